"""Files of a batch that others plant, remove or replace: nothing of theirs is followed, waited for
or destroyed, and no result is lost."""

import fcntl
import json
import os
import shutil
import signal
import time
from contextlib import contextmanager

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.report import page as report_module
from mmdeploy_llm.batch.report.page import ReportHead, write_report
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.data.outputs import jsonl_writer as writer_module
from mmdeploy_llm.data.outputs.jsonl_writer import RecordWriter
from mmdeploy_llm.data.outputs.scan import RecordIndex, read_records, scan
from mmdeploy_llm.data.records.files import Folder, OutputLostError
from mmdeploy_llm.data.records.item import Media
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError

MAX_SECONDS = 60
HEAD = ReportHead(model="m", created="today", version="1")


@contextmanager
def deadline():
    """A test that hangs fails."""

    def ring(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(MAX_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def out(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results" / "out.jsonl"


@pytest.fixture
def precious(tmp_path):
    """A file of somebody else, and its folder."""
    path = tmp_path / "home" / "ab" / "precious.jpg"
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    return path


def plant(kind, path, precious):
    """Puts something that is not a regular file at `path`."""
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"link": precious, "dangling": "nowhere", "device": "/dev/zero"}[kind])


KINDS = ("link", "dangling", "device", "fifo", "folder")


def record(name, **values):
    return Record(id=name, text=f"text of {name}", **values)


def failed(name):
    error = ItemError(code=400, kind="RequestError", message="no")
    return Record(id=name, error=error)


def fill(out, *records):
    with RecordWriter(out, "new") as writer:
        for each in records:
            writer.write(each, 1)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("mode", ["new", "overwrite", "resume"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_output_that_is_no_regular_file_is_refused(out, precious, kind, mode):
    plant(kind, out, precious)
    with deadline(), pytest.raises(ConfigError, match=r"out\.jsonl' is a"):
        plan_batch([{"prompt": "a"}], out, BatchSettings(mode=mode))
    with deadline(), pytest.raises(ConfigError, match=r"out\.jsonl' is a"):
        RecordWriter(out, mode)
    with deadline(), pytest.raises(ConfigError):
        list(read_records(out))
    assert precious.read_text() == "precious"
    assert not (out.parent / "nowhere").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_planted_after_the_check_is_refused_too(out, precious, kind, monkeypatch):
    """The file takes the place of the output between its check and its opening."""
    fill(out, record("a"))
    kept = scan(out, lambda _: 1)
    monkeypatch.setattr(writer_module, "check_target", lambda *_: plant(kind, out, precious))
    with deadline(), pytest.raises(ConfigError, match=r"out\.jsonl' is a"):
        RecordWriter(out, "resume", kept)
    assert precious.read_text() == "precious"


@pytest.mark.one_is_quick
@pytest.mark.parametrize("kind", KINDS)
def test_links_in_place_of_partial_files_are_not_followed(out, precious, kind):
    fill(out, record("a"), failed("b"))
    for name in ("out.jsonl.partial", "out.jsonl.config.json.partial", "page.html.partial"):
        plant(kind, out.with_name(name), precious)
    kept = scan(out, lambda _: 1)
    if kind == "folder":
        with pytest.raises(ConfigError, match=r"partial' is a folder; remove it"):
            RecordWriter(out, "resume", kept)
        return
    with deadline(), RecordWriter(out, "resume", kept) as writer:
        writer.write(record("b"), 2)
    with deadline():
        write_report(out.with_name("page.html"), [], HEAD, RecordIndex(), None, num_shown=0)
    assert [each.id for each in read_records(out)] == ["a", "b"]
    assert precious.read_text() == "precious"
    assert out.with_name("page.html").read_text().endswith("</html>")


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_that_is_no_regular_file_is_refused(out, precious, kind):
    page = out.with_name("page.html")
    plant(kind, page, precious)
    before = os.lstat(page)
    with deadline(), pytest.raises(ConfigError, match=r"page\.html' is a"):
        write_report(page, [], HEAD, RecordIndex(), None, num_shown=0)
    assert os.path.samestat(before, os.lstat(page))
    assert precious.read_text() == "precious"


@pytest.mark.parametrize("kind", KINDS)
def test_what_takes_the_name_of_a_file_while_it_is_written_stays(out, precious, kind):
    def pieces():
        yield b"new"
        plant(kind, out, precious)

    with (
        Folder.open(out.parent) as folder,
        deadline(),
        pytest.raises(ConfigError, match=r"out\.jsonl' is a"),
    ):
        folder.write("out.jsonl", pieces())
    assert not out.is_file() or out.is_symlink()
    assert os.listdir(out.parent) == ["out.jsonl"]
    assert precious.read_text() == "precious"


def large_report(page, num=report_module.EMBEDDED_CARDS + 1, during=lambda number: None):
    """A report of items with one picture each; calls `during` before each picture."""
    sources = page.parents[1] / "sources"
    sources.mkdir(exist_ok=True)
    index = RecordIndex()

    def records():
        for number in range(num):
            during(number)
            path = sources / f"{number}.png"
            path.touch()
            yield Record(id=number, media=(Media(kind="image", name=str(path)),))

    for number in range(num):
        index.add(Record(id=number), number, 0)
    write_report(page, records(), HEAD, index, lambda media: [b"jpeg"], num_shown=num)


@pytest.mark.parametrize("name", ["page_files", "page_files/pictures"])
def test_a_linked_folder_of_a_large_report_is_refused(out, precious, name):
    page = out.with_name("page.html")
    place = out.parent / name
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(precious.parents[1])
    with pytest.raises(ConfigError, match="not a folder, and links are not followed"):
        large_report(page)
    assert [path for path in precious.parents[1].rglob("*") if path.is_file()] == [precious]


@pytest.mark.parametrize("name", ["page_files", "page_files/pictures", "page_files/pictures/ab"])
def test_cleaning_up_after_a_larger_report_follows_no_link(out, precious, name):
    for old in ("cards-001.js", "pictures/ab/old.jpg"):
        path = precious.parents[1] / old
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    place = out.parent / name
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(precious.parents[1] if name == "page_files" else precious.parent)
    before = sorted(precious.parents[1].rglob("*"))
    write_report(out.with_name("page.html"), [], HEAD, RecordIndex(), None, num_shown=0)
    assert sorted(precious.parents[1].rglob("*")) == before


@pytest.mark.one_is_quick
@pytest.mark.parametrize("what", ["page_files/pictures/*/*.jpg", "page_files", "."])
@pytest.mark.parametrize("is_moved", [True, False])
def test_pictures_that_vanish_while_a_report_is_written_are_noticed(out, tmp_path, what, is_moved):
    page = out.with_name("page.html")

    def vanish(number):
        if number == report_module.EMBEDDED_CARDS - 20:
            for path in [out.parent] if what == "." else list(out.parent.glob(what)):
                path.rename(tmp_path / "moved")
                if is_moved and what != "page_files/pictures/*/*.jpg":
                    path.mkdir()

    with pytest.raises(OutputLostError):
        large_report(page, during=vanish)


def test_a_page_that_is_removed_while_it_is_written_is_noticed(out):
    page = out.with_name("page.html")
    write_report(page, [], HEAD, RecordIndex(), None, num_shown=0)
    old = page.read_bytes()

    def records():
        page.with_name("page.html.partial").unlink()
        yield record("a")

    index = RecordIndex()
    index.add(record("a"), 1, 0)
    with pytest.raises(OutputLostError, match=r"page\.html\.partial' was removed or replaced"):
        write_report(page, records(), HEAD, index, None, num_shown=1)
    assert page.read_bytes() == old


def harm(how, out, precious):
    """Removes or replaces an output during a run."""
    if how == "folder removed":
        shutil.rmtree(out.parent)
    elif how == "moved":
        out.rename(out.with_name("moved.jsonl"))
    elif how == "edited":  # as `sed -i` and most editors write
        copy = out.with_name("copy")
        copy.write_bytes(out.read_bytes())
        os.replace(copy, out)
    else:
        out.unlink()
        if how == "linked":
            out.symlink_to(precious)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("how", ["removed", "moved", "edited", "linked", "folder removed"])
def test_an_output_that_is_lost_during_a_run_is_noticed_and_saved(
    out, precious, how, fake_llm, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    def rows():
        for number in range(10):
            if number == 4:
                harm(how, out, precious)
            yield {"id": f"item-{number}", "prompt": "a"}

    job = plan_batch(rows(), out, BatchSettings())
    with pytest.raises(OutputLostError, match=r"out\.jsonl' was removed or replaced") as caught:
        run_batch(job, lambda: fake_llm)
    assert fake_llm.num_taken <= 6  # at once
    assert fake_llm.is_aborted
    saved = str(caught.value).partition("all its results are in '")[2].partition("'")[0]
    found = [each.id for each in read_records(out.parent.parent / saved)]
    assert len(found) >= 3
    assert set(found) <= {f"item-{number}" for number in range(6)}
    assert precious.read_text() == "precious"
    if how == "linked":
        out.unlink()
    if how == "folder removed":
        assert os.path.dirname(saved) == str(tmp_path)
        out.parent.mkdir()
    os.rename(saved, out)  # as the message says
    again = [{"id": f"item-{number}", "prompt": "a"} for number in range(10)]
    run_batch(plan_batch(again, out, BatchSettings(mode="resume")), lambda: fake_llm)
    assert sorted(each.id for each in read_records(out)) == [f"item-{n}" for n in range(10)]


def test_an_output_that_is_lost_after_the_last_record_is_noticed(out):
    with RecordWriter(out, "new") as writer:
        writer.write(record("a"), 1)
        out.unlink()
        with pytest.raises(OutputLostError, match="all its results are in"):
            writer.finish(lambda _: 1)


def test_a_loss_that_cannot_be_saved_says_so(out, monkeypatch):
    def full(*_):
        raise OSError("no space")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with RecordWriter(out, "new") as writer:
        out.unlink()
        with pytest.raises(OutputLostError, match="could not be saved"):
            writer.write(record("a"), 1)


@pytest.mark.parametrize("num_times", [1, 3, writer_module.MAX_TRIES])
def test_the_lock_is_that_of_the_file_that_has_the_name(out, monkeypatch, num_times):
    """Another run replaces the output between our opening and locking it, as a resume does."""
    fill(out, record("a"))
    kept, flock, calls = scan(out, lambda _: 1), fcntl.flock, []

    def replaced(file, flags):
        calls.append(file)
        if len(calls) <= num_times:
            copy = out.with_name("copy")
            copy.write_bytes(out.read_bytes())
            os.replace(copy, out)
        return flock(file, flags)

    monkeypatch.setattr("fcntl.flock", replaced)
    words = "again and again" if num_times == writer_module.MAX_TRIES else "another run wrote"
    with pytest.raises(ConfigError, match=words):
        RecordWriter(out, "resume", kept)
    assert [each.id for each in read_records(out)] == ["a"]
    with RecordWriter(out, "resume", scan(out, lambda _: 1)) as writer:
        writer.write(record("b"), 2)
    assert [each.id for each in read_records(out)] == ["a", "b"]


def test_lines_that_come_while_the_output_is_read_are_not_cut_off(out, monkeypatch):
    fill(out, record("a"))

    def place(each):
        with out.open("a") as file:
            file.write(record(f"later {out.stat().st_size}").to_json() + "\n")
        monkeypatch.undo()
        return 1

    calls = iter([place])
    kept = scan(out, lambda each: next(calls, lambda _: 1)(each))
    with pytest.raises(ConfigError, match="another run wrote"):
        RecordWriter(out, "resume", kept)
    assert len(list(read_records(out))) == 2


def test_a_private_output_stays_private(out):
    fill(out, record("a"), failed("b"))
    out.chmod(0o600)
    with RecordWriter(out, "resume", scan(out, lambda _: 1)):
        pass
    assert out.stat().st_mode & 0o777 == 0o600


def test_a_folder_is_not_left_through_names(out, precious):
    with Folder.open(out.parent) as folder:
        (out.parent / "link").symlink_to(precious.parent)
        assert folder.existing("link") is None
        assert folder.names() == []
        folder.remove("link")
    assert precious.read_text() == "precious"


def wait_for(path, num_lines):
    end = time.monotonic() + MAX_SECONDS
    while not path.exists() or path.read_bytes().count(b"\n") < num_lines:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_two_processes_and_a_replaced_output(out, fake_llm, in_child, tmp_path):
    """One run loses its file to another run under the same name. It stops at once and keeps its
    results; the other one, killed later, is resumed."""

    def rows(num):
        for number in range(num):
            time.sleep(0.01)
            yield {"id": f"item-{number}", "prompt": f"{os.getpid()} {number}"}

    def run(num, mode, said=None):
        try:
            run_batch(plan_batch(rows(num), out, BatchSettings(mode=mode)), lambda: fake_llm)
        except OutputLostError as error:
            said.write_text(str(error))
            raise

    said = tmp_path / "said"
    with deadline():
        first = in_child.start(lambda: run(2000, "new", said))
        wait_for(out, 3)
        out.unlink()
        second = in_child.start(lambda: run(2000, "new"))
        assert in_child.wait(first) == 1
        saved = said.read_text().partition("all its results are in '")[2].partition("'")[0]
        assert len(list(read_records(out.parent / saved))) >= 3
        wait_for(out, 3)
        with pytest.raises(ConfigError, match="another run is writing"):
            run(40, "resume")
        os.kill(second, signal.SIGKILL)
        assert in_child.wait(second) == -signal.SIGKILL
        run(40, "resume")
    ids = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    assert len(ids) == len(set(ids))
    assert {f"item-{number}" for number in range(40)} <= set(ids)
