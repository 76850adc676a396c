"""The report of a run: made while it goes on, used again by the next run, served while it runs."""

import html
import http.client
import io
import json
import os
import tarfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from mmdeploy_llm import LLM, SamplingParams
from mmdeploy_llm.batch.report.growing import GrowingReport
from mmdeploy_llm.batch.report.kept import read_kept
from mmdeploy_llm.batch.report.live import LiveReport
from mmdeploy_llm.batch.report.page import EMBEDDED_CARDS, ReportHead, write_report
from mmdeploy_llm.batch.report.previews import FilePreviews, bytes_of
from mmdeploy_llm.batch.report.whole import ReportOptions, RunReport
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.item import Item, Media
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.engine.intake.prompts import PromptReader
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import claimed

PARAMS = SamplingParams(temperature=0, max_tokens=24)
HEAD = ReportHead(model="m", created="today", version="1")


class Loader:
    """Counts the previews that it makes."""

    limits = "limits"

    def __init__(self):
        self.made = []

    def previews(self, item, maker=None):
        self.made.append(item.source)
        return (b"small",)


def picture(color="red"):
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), color).save(buffer, "PNG")
    return buffer.getvalue()


class Tally:
    def __init__(self):
        moment = SimpleNamespace(num_ended=3, num_left=5, seconds_left=65.0, per_second=2.0)
        self.clock = SimpleNamespace(moment=lambda: moment)

    def progress(self):
        return {"num_left": 5, "seconds_left": 65.0}


def grown(path, records, loader, *, items=None, is_hurried=False, total=None, skip=0, **options):
    """Runs a report over records and writes its page."""
    report = GrowingReport(
        path,
        lambda running: ReportHead(model="m", created="today", version="1", running=running),
        FilePreviews(lambda: loader, lambda: loader),
        total=len(records) if total is None else total,
        **options,
    )
    report.begin(Tally())
    index = RecordIndex()
    for place, record in enumerate(records):
        index.add(record, place, 0)
        if place < skip:  # done by an earlier run
            continue
        while report._queue.full():
            time.sleep(0.001)
        report.take(record, items[place] if items else SimpleNamespace())
    report.finish(is_hurried=is_hurried)
    previews = FilePreviews(lambda: loader, lambda: loader)
    write_report(
        path,
        iter(records),
        HEAD,
        index,
        previews,
        num_shown=len(records),
        rules="'limits'",
        made=report,
    )
    return report


def records_of(folder, num, text="a cat"):
    return [
        Record(id=f"{n}.png", path=str(folder / f"{n}.png"), text=f"{text} {n}", item_digest="d")
        for n in range(num)
    ]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("num", [5, EMBEDDED_CARDS + 250])
def test_a_resumed_run_makes_no_card_again(tmp_path, num):
    """One page of few items, and one with scripts and files of pictures."""
    page, loader = tmp_path / "page.html", Loader()
    records = records_of(tmp_path, num)
    for record in records:
        Path(record.path).write_bytes(b"x" + record.id.encode())
    grown(page, records[:-2], loader, total=num)
    assert len(loader.made) == num - 2
    again = Loader()
    before = page.read_text()
    assert before.count("<article") == min(num - 2, 200 if num > EMBEDDED_CARDS else num)
    report = grown(page, records, again, is_resumed=True, skip=num - 2)
    assert len(again.made) == 2, "only the new ones"
    assert all(report.row(record) for record in records)
    assert "running" not in page.read_text().partition("<header")[2].partition("<main")[0]


def test_pictures_in_files_are_shown_before_there_are_scripts(tmp_path):
    """The page of a large run that is at its beginning, or was interrupted there."""
    page = tmp_path / "page.html"
    (tmp_path / "0.png").write_bytes(b"x")
    grown(page, records_of(tmp_path, 1), Loader(), total=EMBEDDED_CARDS + 1)
    assert 'src="page_files/pictures/' in page.read_text()
    assert "img-src data: 'self' file:;" in html.unescape(page.read_text())


def test_another_answer_or_another_input_is_another_card(tmp_path):
    page, loader = tmp_path / "page.html", Loader()
    (tmp_path / "0.png").write_bytes(b"x")
    grown(page, records_of(tmp_path, 1), loader)
    report = grown(page, records_of(tmp_path, 1, "a dog"), loader, is_resumed=True)
    assert len(loader.made) == 2
    assert "a dog" in page.read_text()
    assert "a cat" not in page.read_text()
    assert report.row(Record(id="1", text="x")) is None, "without a digest"


read = PromptReader.of_kinds(BUILT_IN_KINDS).read


def test_pictures_of_a_corpus_are_made_of_the_bytes_that_the_item_holds(tmp_path):
    loader = Loader()
    content = [{"type": "image", "image": b"one"}, {"type": "image_url", "image_url": "/a.png"}]
    media = (Media(kind="image", name="(image of row 1)"), Media(kind="image", name="/a.png"))
    messages = [{"role": "user", "content": [*content, {"type": "text", "text": "?"}]}]
    prompt = read({"messages": messages})
    item = Item(line=1, id=1, prompt=prompt, params=PARAMS, media=media)
    assert bytes_of(item) == [b"one", None]
    record = Record(id=1, line=1, text="x", media=media, item_digest="d")
    grown(tmp_path / "page.html", [record], loader, items=[item])
    assert loader.made[0] == b"one"
    assert (tmp_path / "page.html").read_text().count("<img") == 2
    data = {
        "multimodal_data": {"image": [b"a", {"image": b"b", "detail": "low"}], "video": "x.mp4"}
    }
    three = tuple(Media(kind=kind, name="(bytes)") for kind in ("image", "image", "video"))
    own = Item(line=1, id=1, prompt=read(data), params=PARAMS, media=three)
    assert bytes_of(own) == [b"a", b"b", None]


def test_an_interrupted_run_does_not_wait_for_pictures(tmp_path):
    released = threading.Event()

    class Slow(Loader):
        def previews(self, item, maker=None):
            released.wait(120)
            return ()

    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(b"x")
    begin = time.monotonic()
    grown(tmp_path / "page.html", records_of(tmp_path, 3), Slow(), is_hurried=True)
    assert time.monotonic() - begin < 60
    released.set()
    page = (tmp_path / "page.html").read_text()
    assert page.count("no preview") == 3
    assert "data-key" not in page, "the next run makes them"


def test_cards_that_somebody_else_wrote_are_not_taken_over(tmp_path):
    page = tmp_path / "page.html"
    (tmp_path / "0.png").write_bytes(b"x")
    grown(page, records_of(tmp_path, 1), Loader())
    good = page.read_text()
    with Folder.open(tmp_path) as parent:
        assert len(list(read_kept(parent, page.name, "page_files"))) == 1
        for evil in ("<script>1</script>", '<img src="x" onerror="1">', '<iframe src="x">', "<a>"):
            page.write_text(good.replace('<div class="body">', f'<div class="body">{evil}'))
            assert list(read_kept(parent, page.name, "page_files")) == []
        page.write_text(good.replace("generator", "author"))
        assert list(read_kept(parent, page.name, "page_files")) == []
        (tmp_path / "page_files").mkdir()
        for number, text in enumerate(
            ("", "reportCards(1);", "reportCards([[1]]);", "[" * 10**5), 1
        ):
            (tmp_path / "page_files" / f"cards-{number:03d}.js").write_text(text)
        os.symlink("/etc/passwd", tmp_path / "page_files" / "cards-009.js")
        page.write_text(good)
        assert len(list(read_kept(parent, page.name, "page_files"))) == 1


@pytest.fixture
def live(tmp_path):
    page = tmp_path / "my page.html"
    page.write_text("<p>the page")
    (tmp_path / "my page_files" / "pictures" / "ab").mkdir(parents=True)
    (tmp_path / "my page_files" / "cards-001.js").write_text("cards")
    (tmp_path / "secret.txt").write_text("secret")
    os.symlink(tmp_path / "secret.txt", tmp_path / "my page_files" / "cards-002.js")
    server = LiveReport(page, lambda: {"text": "3 done"})
    yield server
    server.close()


def asked(server, path, method="GET", host=None):
    port = int(server.url.rstrip("/").rpartition(":")[2])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, data


@pytest.mark.full
def test_the_live_report_serves_its_own_files_and_nothing_else(live):
    assert live.url.startswith("http://127.0.0.1:")
    assert asked(live, "/") == (200, b"<p>the page")
    assert asked(live, "/my%20page.html")[0] == 200
    assert asked(live, "/my%20page_files/cards-001.js") == (200, b"cards")
    status, state = asked(live, "/state.json?x")
    assert (status, json.loads(state)) == (200, {"text": "3 done"})
    for path in (
        *("/secret.txt", "/../secret.txt", "/%2e%2e/secret.txt", "//etc/passwd", "/etc/passwd"),
        *("/my%20page_files/../secret.txt", "/my%20page_files/cards-002.js", "/my%20page_files/"),
        *("/my%20page_files/pictures/ab/", "/other_files/cards-001.js", "/my%20page_files/a\\b"),
        f"/my%20page_files/pictures/ab/{'a' * 24}-000.jpg",
    ):
        assert asked(live, path)[0] in (400, 404), path


@dataclass(frozen=True, kw_only=True)
class Settings:
    mode: str = "new"
    watch: object = None


@dataclass(frozen=True, kw_only=True)
class Job:
    source: object
    settings: Settings = Settings()


def test_a_report_that_cannot_begin_leaves_no_server_and_no_claim(tmp_path):
    job = Job(source=SimpleNamespace(kinds=dict, total=1))
    previews = FilePreviews(Loader, Loader)
    page, options = tmp_path / "page.html", ReportOptions(model="m", about={}, live_port=0)
    before = set(threading.enumerate())
    with claimed(page), pytest.raises(ConfigError, match="another run"):
        RunReport(job, page, previews, options)
    assert not [own for own in set(threading.enumerate()) - before if own.name == "live report"]
    with pytest.raises(ConfigError, match="port"):
        RunReport(job, page, previews, replace(options, live_port=99999))
    with claimed(page):
        pass


@pytest.mark.full
def test_the_live_report_answers_get_to_its_own_name_only(live):
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert asked(live, "/", method)[0] in (405, 501), method
    port = live.url.rstrip("/").rpartition(":")[2]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}0", ""):
        assert asked(live, "/", host=host)[0] == 421, host
    assert asked(live, "/", host=f"localhost:{port}")[0] == 200
    with pytest.raises(ConfigError, match="cannot be used"):
        LiveReport(Path("x.html"), dict, int(port))


@pytest.mark.full
def test_a_tar_of_pictures_has_them_in_its_report_and_the_report_is_cheap(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, color in enumerate(("red", "green", "blue") * 4):
            data = picture(color)
            entry = tarfile.TarInfo(f"p{number}.png")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    page, out = tmp_path / "page.html", tmp_path / "out.jsonl"
    with LLM("shapes-vl", quiet=True) as llm:
        summary = llm.run_batch(
            tmp_path / "a.tar", out, report=page, sampling_params=PARAMS, use_tqdm=False, live=True
        )
        first = page.read_text()
        llm.run_batch(
            tmp_path / "a.tar",
            out,
            report=page,
            sampling_params=PARAMS,
            use_tqdm=False,
            resume=True,
        )
    assert summary.num_records == 12
    assert first.count("<img") == page.read_text().count("<img") == 12
