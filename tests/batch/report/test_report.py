"""The HTML report: complete, escaped, self-contained; a large report is split into files."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from mmdeploy_llm.batch.report.cards import Card
from mmdeploy_llm.batch.report.page import CHUNK_CARDS, EMBEDDED_CARDS, ReportHead, write_report
from mmdeploy_llm.batch.report.previews import FilePreviews
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.item import Media
from mmdeploy_llm.data.records.record import ItemError, Record, Timings
from mmdeploy_llm.errors import ABORTED, MediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image.thumbnail import Thumbnails

HEAD = ReportHead(
    model="shapes-vl",
    prompt='What is <this> & "that"?',
    created="today",
    version="9.9",
    unit="image",
    done="captioned",
    speeds={"images/s": "4.2"},
    settings={"dtype": "auto"},
)


class Page(HTMLParser):
    """Collects a page's elements, their attributes, and text by the class of its element."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: dict[str, list[str]] = {}
        self._open = [""]
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "input", "link", "br"):
            self._open.append(dict(attrs).get("class") or tag)

    def handle_endtag(self, tag):
        self._open.pop()

    def handle_data(self, data):
        if data.strip():
            self.texts.setdefault(self._open[-1], []).append(data.strip())

    def all(self, name):
        return [attrs for tag, attrs in self.tags if tag == name]


def write(target, records, make=lambda media: (b"small",), num_shown=None):
    index = RecordIndex()
    for number, record in enumerate(records):
        index.add(record, number, 0)
    shown = records[: num_shown or len(records)]
    write_report(target, iter(shown), HEAD, index, make, num_shown=len(shown))


@pytest.fixture
def page(tmp_path, png):
    """Returns a function that writes records as a page and reads it back."""

    def make(*records, **options):
        (tmp_path / "a.png").write_bytes(png)
        target = tmp_path / "deep" / "page.html"
        write(target, records, **options)
        assert list(target.parent.iterdir()) == [target]
        return target.read_text()

    return make


def good(path="a.png", **values):
    return Record(**{"id": str(path), "path": str(path), "text": "a cat", **values})


def failed(path="gone.png", code=400, message="x"):
    error = ItemError(code=code, kind="MediaError", message=message)
    return Record(id=path, path=path, error=error)


def test_answers_that_are_lists_are_shown_in_their_own_letters(page):
    html = page(good(answers={"颜色": ["红", "<蓝>"], "有圆": True}))
    assert Page(html).texts["caption"] == ['颜色: ["红", "<蓝>"]']
    assert "有圆: true" in html
    assert 'lang="zh"' in html


def test_words_are_found_in_any_form_of_their_letters(page):
    card = Card(record=good(text="ＦＵＬＬ　cafe\u0301"), pictures=())
    assert "full caf\u00e9" in card.words


def test_a_picture_with_its_caption_reasoning_and_numbers(page, tmp_path):
    record = good(
        tmp_path / "a.png",
        reasoning="It has whiskers.",
        num_image_tokens=1600,
        num_prompt_tokens=1612,
        num_output_tokens=7,
        timings=Timings(total=0.5, first_token=0.1),
    )
    html = page(record)
    shown = Page(html)
    assert shown.texts["caption"] == ["a cat"]
    assert shown.texts["thought"] == ["It has whiskers."]
    assert "1\u202f600 image, 1\u202f612 prompt → 7 tokens" in shown.texts["li"]
    assert shown.texts["time"] == ["500 ms"]
    assert shown.texts["name"] == ["a.png"]
    assert [image["loading"] for image in shown.all("img")] == ["lazy"]
    assert shown.all("img")[0]["src"] == "data:image/jpeg;base64,c21hbGw="
    assert "no preview" not in html
    assert "failed" not in shown.all("article")[0]["class"]


def test_a_failure_is_marked_with_its_message(page, tmp_path):
    broken = failed(code=415, message="not <an> image")
    shown = Page(page(broken, good(tmp_path / "a.png"), make=lambda media: ()))
    assert [card["class"] for card in shown.all("article")] == ["card failed", "card"]
    assert shown.all("article")[0]["data-failure"] == "415 MediaError"
    assert shown.texts["fault"] == ["not <an> image"]
    assert "Failed (415)" in shown.texts["strong"]
    assert "no preview" in shown.texts["p"]


def test_failures_can_be_chosen_by_kind(page):
    shown = Page(page(failed("a"), failed("b"), failed("c", 413), good()))
    values = [option["value"] for option in shown.all("option")]
    assert values[:3] == ["", "400 MediaError", "413 MediaError"]
    assert values[3:] == ["", "outcome", "most", "fewest", "slow"]
    assert "400 MediaError · 2" in shown.texts["option"]
    assert [own["name"] for own in Page(page(good())).all("select")] == ["order"]


def test_answers_that_lack_something_can_be_chosen_by_their_outcome(page):
    outcomes = ("empty", "truncated", "repetition", "ok")
    shown = Page(page(*(good(name, outcome=name) for name in outcomes)))
    outcomes = [card["data-outcome"] for card in shown.all("article")]
    assert outcomes == ["empty", "truncated", "repetition", "ok"]
    assert [card["class"] for card in shown.all("article")] == ["card lacking"] * 3 + ["card"]
    chosen = [choice["value"] for choice in shown.all("input") if choice["name"] == "which"]
    assert chosen == ["all", "ok", "empty", "repetition", "truncated", "failed"]
    assert shown.texts["lack"] == ["empty", "truncated", "repetition"]
    plain = [choice["value"] for choice in Page(page(good())).all("input") if "value" in choice]
    assert plain == ["all", "ok", "failed"]


def test_head_and_totals(page, tmp_path):
    shown = Page(page(good(num_output_tokens=1200), failed("b")))
    totals = dict(zip(shown.texts["dt"], shown.texts["dd"], strict=True))
    assert totals == {
        "images": "2",
        "failed": "1",
        "images/s": "4.2",
        "image tokens": "0",
        "output tokens": "1\u202f200",
        "dtype": "auto",
    }
    assert shown.texts["q"] == ['What is <this> & "that"?']
    assert shown.texts["h1"] == ["2 images, captioned by shapes-vl"]


def test_a_line_shows_its_question_samples_and_all_its_media(page):
    record = Record(
        id="q-7",
        line=7,
        text="one",
        prompt="Which?",
        media=(Media(kind="image", name="/a.png"), Media(kind="video", name="/b.mp4")),
        outputs=({"text": "one"}, {"text": "two"}),
    )
    frames = {"image": (b"a",), "video": (b"b", b"c")}
    shown = Page(page(record, make=lambda media: frames[media.kind]))
    assert shown.texts["asked"] == ["Which?"]
    assert shown.texts["caption"] + shown.texts["caption more"] == ["one", "two"]
    assert [image["alt"] for image in shown.all("img")] == [
        "a.png",
        "b.mp4, frame 1",
        "b.mp4, frame 2",
    ]
    assert shown.texts["name"] == ["q-7"]
    strip = next(tag for tag in shown.all("div") if tag.get("class") == "picture strip")
    assert strip["tabindex"] == "0"


def test_answers_to_several_questions_are_shown_by_name(page):
    answers = {"caption": "a cat", "tags": "<b>Fur</b>", "is_cat": True, "alone": "a cat"}
    samples = [
        {"question": name, "index": index, "text": f"{text} {index}"}
        for name, text in (("caption", "a cat"), ("alone", "one"))
        for index in range(2)
    ]
    shown = Page(page(Record(id="a", text="a cat", answers=answers, outputs=tuple(samples))))
    assert shown.texts["caption"] == ["caption: a cat"]
    assert shown.texts["caption more"] == [
        *("tags: <b>Fur</b>", "is_cat: true", "alone: a cat"),
        *("caption: a cat 1", "alone: one 1"),
    ]


def test_nothing_a_model_or_a_file_name_says_becomes_markup(page):
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    html = page(
        Record(id=evil, path=evil, text=evil, reasoning=evil, prompt=evil),
        failed(evil, message=evil),
    )
    assert len(re.findall("<script>", html)) == 1
    assert 'onerror="' not in html
    assert Page(html).texts["caption"] == [evil]


def test_the_page_needs_nothing_else(page, tmp_path):
    html = page(good(tmp_path / "a.png"))
    assert not re.search(r"https?://|@import|url\(", html)
    assert not Page(html).all("link")
    policy = Page(html).all("meta")[2]["content"]
    assert "default-src 'none'" in policy
    assert "file:" not in policy


def test_a_name_that_is_no_text(page):
    assert "bytes\ufffd.png" in page(good("bytes\udcff.png"))


def test_of_very_many_not_all_are_shown_and_that_is_said(page):
    shown = Page(page(*(good(f"{number}.png") for number in range(5)), num_shown=3))
    assert shown.texts["name"] == ["0.png", "1.png", "2.png"]
    assert any("3 of 5 images are shown" in text for text in shown.texts["wrap"])


@pytest.fixture
def large(tmp_path, png):
    """More records than fit into one file; the first two have pictures."""
    num = EMBEDDED_CARDS + 150
    for name in ("0.png", "1.png"):
        (tmp_path / name).write_bytes(png + name.encode())
    records = [good(tmp_path / f"{number}.png") for number in range(num - 1)]
    return [*records, failed(message="</script> evil")]


def rows_of(folder):
    """Returns the rows that the page's scripts report to it, in order."""
    texts = [path.read_text() for path in sorted(folder.glob("cards-*.js"))]
    return [row for text in texts for row in json.loads(text[len("reportCards(") : -len(");\n")])]


def test_a_large_report_is_a_page_and_a_folder(large, tmp_path):
    target = tmp_path / "my report.html"
    made = []

    def make(media):
        made.append(media.name)
        return (b"jpeg",)

    write(target, large, make)
    folder = tmp_path / "my report_files"
    shown = Page(target.read_text())
    assert len(shown.all("article")) == CHUNK_CARDS
    rows = rows_of(folder)
    assert len(rows) == len(large) - CHUNK_CARDS
    outcome, failure, words, html = rows[-1]
    assert (outcome, failure) == ("failed", "400 MediaError")
    assert words.startswith("gone.png failed (400)")
    assert Page(html).all("article")[0]["class"] == "card failed"
    assert sorted(made) == [str(tmp_path / "0.png"), str(tmp_path / "1.png")]
    sources = [image["src"] for image in shown.all("img")]
    assert len(sources) == 2
    for source in sources:
        assert (tmp_path / source.replace("%20", " ")).read_bytes() == b"jpeg"
    assert target.stat().st_size < 400_000


@pytest.mark.full
def test_pictures_of_an_earlier_report_are_used_again_and_old_ones_go(large, tmp_path):
    target = tmp_path / "page.html"
    folder = tmp_path / "page_files"
    write(target, large, lambda media: (b"first",))
    before = set(folder.glob("pictures/*/*.jpg"))
    (tmp_path / "1.png").write_bytes(b"another picture")
    made = []
    write(target, large, lambda media: made.append(media.name) or (b"second",))
    assert made == [str(tmp_path / "1.png")]
    after = set(folder.glob("pictures/*/*.jpg"))
    assert sorted(path.read_bytes() for path in after) == [b"first", b"second"]
    assert len(before & after) == 1
    write(target, large[:5])
    assert not list(folder.glob("cards-*.js"))
    assert not list(folder.glob("pictures/*/*.jpg"))


def test_records_are_not_held(tmp_path):
    """Only a few records are read ahead while the report is written."""
    alive = []

    class Watched(Record):
        def __del__(self):
            alive.remove(id(self))

    most = 0

    def records():
        nonlocal most
        for number in range(2000):
            record = Watched(id=number, text="x")
            alive.append(id(record))
            most = max(most, len(alive))
            yield record

    index = RecordIndex()
    write_report(tmp_path / "page.html", records(), HEAD, index, lambda media: (), num_shown=2000)
    assert most < 4 * CHUNK_CARDS  # the page's chunk, the one being written, the one being made
    assert len(rows_of(tmp_path / "page_files")) == 2000 - CHUNK_CARDS


class FakeLoader:
    """A MediaLoader's attributes that previews need; the preview of a file is its name."""

    def __init__(self, limits=None):
        self.limits = limits or MediaLimits()
        self.makers = []

    def split(self, items):
        return [(item,) for item in items]

    def previews(self, item, maker=None):
        self.makers.append((item.kind, maker))
        if "gone" in item.source.uri:
            raise MediaError("it does not exist")
        return (item.source.uri.encode(),)


def test_previews_are_of_files_that_can_be_read():
    loaders = {"image": FakeLoader(), "video": FakeLoader()}
    opened = []

    def opener(kind):
        return lambda: opened.append(kind) or loaders[kind]

    make = FilePreviews(opener("image"), opener("video"))
    for name in ("(bytes)", "(data: URL)", "https://x.org/a.png", "file:///a.png"):
        assert make(Media(kind="image", name=name)) == ()
    assert not opened
    assert make(Media(kind="image", name="/a.png")) == (b"/a.png",)
    assert make(Media(kind="image", name="/gone.png")) == ()
    assert opened == ["image"]
    assert make(Media(kind="video", name="/b.mp4")) == (b"/b.mp4",)
    assert opened == ["image", "video"]
    kinds, makers = zip(*loaders["image"].makers, strict=True)
    assert (set(kinds), {type(maker) for maker in makers}) == ({"image"}, {Thumbnails})
    assert loaders["video"].makers == [("video", None)]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("code", [400, 404, 408, 413, 415])
def test_media_of_refused_items_are_not_opened(page, tmp_path, code):
    def make(media):
        raise AssertionError("opened")

    line = replace(failed("id", code), path=None, media=(Media(kind="image", name="/a.png"),))
    html = page(failed(str(tmp_path / "a.png"), code), line, make=make)
    assert not Page(html).all("img")
    assert html.count("no preview") == 2


@pytest.mark.parametrize("code", [ABORTED, 500])
def test_media_of_items_that_failed_later_are_shown(page, tmp_path, code):
    assert len(Page(page(failed(str(tmp_path / "a.png"), code))).all("img")) == 1


@pytest.mark.full
def test_pictures_made_under_other_limits_are_not_used_again(large, tmp_path):
    target, made = tmp_path / "page.html", []
    index = RecordIndex()
    for root, want in ((None, 2), (None, 2), (tmp_path / "other", 4)):
        limits = replace(MediaLimits(), allowed_root=root)
        rules = FilePreviews(lambda limits=limits: FakeLoader(limits), FakeLoader).rules
        write_report(
            target,
            iter(large),
            HEAD,
            index,
            lambda media: made.append(media) or (b"x",),
            num_shown=len(large),
            rules=rules,
        )
        assert len(made) == want
