"""The HTML page: complete, escaped, self-contained."""

import re
from html.parser import HTMLParser

import pytest

from mmdeploy_llm.batch.records import CaptionRecord, ItemError, Timings
from mmdeploy_llm.batch.report import ReportHead, write_report

HEAD = ReportHead(
    model="shapes-vl",
    prompt='What is <this> & "that"?',
    created="today",
    version="9.9",
    speeds={"images/s": "4.2"},
    settings={"dtype": "auto"},
)


class Page(HTMLParser):
    """What a page holds: elements, their attributes, and text by the class of its element."""

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


@pytest.fixture
def page(tmp_path, png):
    """Writes records as a page and reads it back."""

    def write(*records, thumbnail=lambda blob: b"small", **options):
        (tmp_path / "a.png").write_bytes(png)
        target = tmp_path / "deep" / "page.html"
        write_report(target, records, HEAD, thumbnail, **options)
        assert list(target.parent.iterdir()) == [target]
        return target.read_text()

    return write


def good(path="a.png", **values):
    return CaptionRecord(path=str(path), text="a cat", **values)


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
    assert "1\u202f600 image + 12 text → 7 tokens" in shown.texts["li"]
    assert shown.texts["time"] == ["500 ms"]
    assert shown.texts["name"] == ["a.png"]
    assert [image["loading"] for image in shown.all("img")] == ["lazy"]
    assert shown.all("img")[0]["src"] == "data:image/jpeg;base64,c21hbGw="
    assert "no preview" not in html
    assert "failed" not in shown.all("article")[0]["class"]


def test_a_failure_is_marked_with_its_message(page, tmp_path):
    broken = CaptionRecord(path="gone.png", error=ItemError(code=415, message="not <an> image"))
    shown = Page(page(broken, good(tmp_path / "a.png")))
    assert [card["class"] for card in shown.all("article")] == ["card failed", "card"]
    assert shown.texts["fault"] == ["not <an> image"]
    assert "Failed (415)" in shown.texts["strong"]
    assert "no preview" in shown.texts["p"]


def test_head_and_totals(page, tmp_path):
    shown = Page(
        page(
            good(num_output_tokens=1200),
            CaptionRecord(path="b", error=ItemError(code=400, message="x")),
        )
    )
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


def test_nothing_a_model_or_a_file_name_says_becomes_markup(page):
    evil = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'
    html = page(
        CaptionRecord(path=evil, text=evil, reasoning=evil, error=ItemError(code=400, message=evil))
    )
    assert len(re.findall("<script>", html)) == 1
    assert 'onerror="' not in html
    assert Page(html).texts["caption"] == [evil]


def test_the_page_needs_nothing_else(page, tmp_path):
    html = page(good(tmp_path / "a.png"))
    assert not re.search(r"https?://|@import|url\(", html)
    assert not Page(html).all("link")
    assert "default-src 'none'" in Page(html).all("meta")[2]["content"]


def test_a_picture_without_preview(page, tmp_path):
    html = page(good(tmp_path / "a.png"), thumbnail=lambda blob: None)
    assert "no preview" in html
    assert not Page(html).all("img")


def test_pictures_are_read_one_after_the_other(page, tmp_path, png):
    """While a card is being written, no other picture is open: the page streams."""
    sizes = []

    def thumbnail(blob):
        partial = tmp_path / "deep" / "page.html.partial"
        sizes.append(partial.stat().st_size if partial.exists() else -1)
        return b"x" * 20000

    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png)
    page(*(good(tmp_path / f"{number}.png") for number in range(6)), thumbnail=thumbnail)
    assert sizes == sorted(sizes)
    assert sizes[-1] - sizes[1] > 3 * 20000


def test_of_very_many_failed_ones_come_first(page):
    records = [good(f"{number}.png") for number in range(5)]
    records.append(CaptionRecord(path="broken.png", error=ItemError(code=400, message="x")))
    shown = Page(page(*records, max_cards=3))
    assert shown.texts["name"] == ["0.png", "1.png", "broken.png"]
    assert any("3 of 6 images are shown" in text for text in shown.texts["wrap"])


def test_a_name_that_is_no_text(page):
    assert "bytes\ufffd.png" in page(good("bytes\udcff.png"))
