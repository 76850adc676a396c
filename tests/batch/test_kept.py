"""What a person has beside a batch, or under a name that a command is given, stays as it is."""

import json
import os

import pytest

from mmdeploy_llm.batch.job import plan_batch, run_batch
from mmdeploy_llm.batch.report import page as report_module
from mmdeploy_llm.batch.report.page import ReportHead, write_report
from mmdeploy_llm.batch.settings import BatchSettings
from mmdeploy_llm.checkpoints.saving.folders import Partial, check_output
from mmdeploy_llm.data.files.files import find_media
from mmdeploy_llm.data.files.walk import REPORT_SCRIPT
from mmdeploy_llm.data.outputs.scan import RecordIndex, read_records
from mmdeploy_llm.data.records.files import OutputLostError
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.testing.scaffold.package import write_package

HEAD = ReportHead(model="m", created="today", version="1")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def report(page, num=0, given=None):
    index = RecordIndex()
    for number in range(num):
        index.add(Record(id=number), number, 0)
    records = [Record(id=number) for number in range(num if given is None else given)]
    write_report(page, records, HEAD, index, lambda media: [], num_shown=num)


@pytest.mark.one_is_quick
@pytest.mark.parametrize("text", ["{}\n", "<!doctype html><p>mine", "\0", "x" * 5000])
def test_a_report_replaces_reports_only(tmp_path, text):
    page = tmp_path / "page.html"
    page.write_text(text)
    with pytest.raises(ConfigError, match="is no report of a batch, so it stays"):
        report(page)
    assert page.read_text() == text
    page.write_text("")  # as `mktemp` makes it
    report(page)
    report(page, 1)
    assert b"generator" in page.read_bytes()


def test_pictures_and_scripts_of_a_saved_page_stay(tmp_path):
    """Browsers keep the files of a page that they save in a folder of the same name."""
    names = ("pictures/ab/mine.jpg", "pictures/ab/" + 24 * "a" + "-000.jpg", "cards-mine.js")
    for name in names:
        path = tmp_path / "page_files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
    ours = tmp_path / "page_files/pictures/aa" / f"{24 * 'a'}-000.jpg"
    ours.parent.mkdir()
    ours.touch()
    report(tmp_path / "page.html")
    report(tmp_path / "page.html", report_module.EMBEDDED_CARDS + 1)
    assert all((tmp_path / "page_files" / name).read_text() == "mine" for name in names)
    assert not ours.exists()
    assert (tmp_path / "page_files" / REPORT_SCRIPT).exists()


@pytest.mark.parametrize("num", [3, report_module.EMBEDDED_CARDS + 1])
def test_a_report_without_some_of_its_items_is_not_written(tmp_path, num):
    with pytest.raises(OutputLostError, match=rf"{num - 1} of {num} items were found"):
        report(tmp_path / "page.html", num, given=num - 1)
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize("target", ["folder", "nowhere", "/dev/null"])
def test_links_in_place_of_a_model_or_a_package_stay(tmp_path, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text("{}")
    for name in ("model", "acme-llm"):
        (tmp_path / name).symlink_to(target)
    with pytest.raises(ConfigError, match="is a link"):
        check_output(tmp_path / "model", tmp_path / "source", overwrite=True)
    with pytest.raises(ConfigError, match="exists; nothing is overwritten"):
        write_package("acme", "parser", tmp_path)
    assert os.listdir(tmp_path / "folder") == ["config.json"]


def batch(given, output, mode="new", llm=None, **values):
    settings = BatchSettings(mode=mode, **values)
    return run_batch(plan_batch(given, output, settings), lambda: llm)


FOREIGN = ["my notes", "my notes\n", '{"id": "a", "prompt": "b"}\n', '{"a": 1}', "\n", "x" * 10**5]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("mode", ["overwrite", "resume"])
@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_that_is_no_output_is_neither_overwritten_nor_cut_off(out, mode, text):
    """A line of an input, with an id and a prompt, is no result either."""
    out.write_text(text)
    with pytest.raises(ConfigError, match=r"is no output of a batch|is not a record of a batch"):
        batch([{"id": "a", "prompt": "b"}], out, mode)
    assert out.read_text() == text
    assert os.listdir(out.parent) == [out.name]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("text", ["", "\0" * 99, '{"id": "it', '{"'])
@pytest.mark.parametrize("mode", ["overwrite", "resume"])
def test_what_a_killed_run_or_a_power_cut_leaves_is_continued(out, fake_llm, mode, text):
    out.write_text(text)
    batch([{"id": "a", "prompt": "b"}], out, mode, fake_llm)
    assert [record.id for record in read_records(out)] == ["a"]


def test_bytes_after_the_results_are_moved_to_a_file(out, fake_llm, caplog):
    rows = [{"id": "a", "prompt": "a"}, {"id": "b", "prompt": "b"}]
    batch(rows[:1], out, llm=fake_llm)
    with out.open("a") as file:
        file.write("my notes")
    batch(rows, out, "resume", fake_llm)
    (rest,) = out.parent.glob("out.jsonl.rest-*")
    assert rest.read_text() == "my notes"
    assert rest.name in caplog.text
    assert [record.id for record in read_records(out)] == ["a", "b"]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("mode", ["overwrite", "resume"])
def test_a_hard_link_of_an_output_keeps_what_it_has(out, fake_llm, mode):
    """Backups are hard links."""
    rows = [{"id": name, "prompt": name} for name in "abc"]
    batch(rows[:1], out, llm=fake_llm)
    os.link(out, out.with_name("backup"))
    before = out.read_bytes()
    batch(rows[1:] if mode == "overwrite" else rows, out, mode, fake_llm)
    assert out.with_name("backup").read_bytes() == before
    assert len(list(read_records(out))) == (2 if mode == "overwrite" else 3)


def line(prompt="a", **values):
    return json.dumps({"prompt": prompt, **values}) + "\n"


@pytest.mark.one_is_quick
@pytest.mark.parametrize("mode", ["new", "overwrite", "resume"])
@pytest.mark.parametrize("kind", ["hard link", "link of the folder", "the same", "partial"])
def test_an_input_under_another_name_is_never_the_output(tmp_path, monkeypatch, mode, kind):
    """Also when its lines are results of an earlier run."""
    monkeypatch.chdir(tmp_path)
    given = tmp_path / "data" / ("in.jsonl.partial" if kind == "partial" else "in.jsonl")
    given.parent.mkdir()
    given.write_text(Record(id="a", line=1, text="a").to_json() + "\n")
    before = given.read_bytes()
    if kind == "hard link":
        os.link(given, "other.jsonl")
    (tmp_path / "link").symlink_to("data")
    output = {"hard link": "other.jsonl", "link of the folder": "link/in.jsonl"}.get(
        kind, "./data/../data/in.jsonl"
    )
    with pytest.raises(ConfigError, match="is the input"):
        batch(given, output, mode)
    assert given.read_bytes() == before


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    ("given", "output"),
    [
        ("data", "data/answers.jsonl"),
        ("data", "link/sub/answers.parquet"),
        ("data/*.jsonl", "data/answers.jsonl"),
        ("data/**/*.jsonl", "./data/sub/answers.jsonl"),
        ("data/{a,b}*.jsonl", "data/answers.jsonl"),
    ],
)
def test_an_output_that_a_resumed_run_would_read_is_refused(tmp_path, monkeypatch, given, output):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "sub").mkdir(parents=True)
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "data" / "a.jsonl").write_text(line())
    with pytest.raises(ConfigError, match="would read its own results"):
        batch(given, output)
    plan_batch(given, "answers.jsonl", BatchSettings())
    plan_batch("data/a.jsonl", "data/answers.jsonl", BatchSettings())


def test_parts_that_are_the_input_stay(tmp_path, monkeypatch, fake_llm):
    monkeypatch.chdir(tmp_path)
    batch([{"id": "a", "prompt": "a"}], "out.parquet", llm=fake_llm)
    for given in ("out.parquet", "out.parquet/part-00000.parquet"):
        with pytest.raises(ConfigError, match=r"is the (input|folder of the input)"):
            batch(given, "out.parquet", "overwrite")
    assert (tmp_path / "out.parquet/part-00000.parquet").exists()


def test_parts_of_somebody_else_are_not_overwritten(tmp_path, fake_llm):
    import pyarrow
    from pyarrow import parquet

    part = tmp_path / "data.parquet" / "part-00000.parquet"
    part.parent.mkdir()
    parquet.write_table(pyarrow.table({"prompt": ["a"]}), part)
    before = part.read_bytes()
    with pytest.raises(ConfigError, match="is no output of a batch"):
        batch([{"prompt": "a"}], part.parent, "overwrite", fake_llm)
    assert part.read_bytes() == before


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ["config.json", "state.json"])
@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_files_with_the_names_of_ours_stay(tmp_path, fake_llm, name, output):
    path = tmp_path / (f"out.jsonl.{name}" if output == "out.jsonl" else f"out.parquet/.{name}")
    path.parent.mkdir(exist_ok=True)
    for mode in ("new", "overwrite", "resume"):
        path.write_text('{"mine": true}')
        with pytest.raises(ConfigError, match="move it away"):
            batch([{"prompt": "a"}], tmp_path / output, mode, fake_llm)
        assert path.read_text() == '{"mine": true}'


def test_a_journal_belongs_to_one_url(tmp_path, monkeypatch, fake_llm):
    monkeypatch.chdir(tmp_path)

    def given():
        yield from ({"id": name, "prompt": name} for name in "abc")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        batch(given(), "memory://kept/a.parquet", llm=fake_llm, journal="journal")
    before = (tmp_path / "journal/.open-00000.jsonl").read_bytes()
    assert before.count(b"\n") == 2
    for mode in ("overwrite", "resume"):
        with pytest.raises(ConfigError, match=r"not uploaded yet to 'memory://kept/a\.parquet'"):
            batch([{"prompt": "b"}], "memory://kept/b.parquet", mode, fake_llm, journal="journal")
    assert (tmp_path / "journal/.open-00000.jsonl").read_bytes() == before


def test_a_model_folder_that_is_replaced_while_it_is_written_is_told(tmp_path):
    (tmp_path / "model").mkdir()
    partial = Partial(tmp_path / "model", "digest")
    (partial.folder / "model-00001.safetensors").touch()
    partial.folder.rename(tmp_path / "moved")
    partial.folder.mkdir()
    with pytest.raises(ConfigError, match="was moved or replaced while files were written"):
        partial.finish()
    assert (tmp_path / "moved/model-00001.safetensors").exists()
    assert (tmp_path / "model").exists()


def test_the_pictures_of_a_report_in_the_input_are_no_input(tmp_path):
    """A resumed run over a folder that has its report."""
    ours = tmp_path / "page_files/pictures/aa"
    ours.mkdir(parents=True)
    for path in (tmp_path / "1.png", tmp_path / "sub_files" / "2.png", ours / "3.jpg"):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "page_files/cards-001.js").touch()
    found = find_media([str(tmp_path)], is_recursive=True)
    assert [os.path.basename(file.path) for file in found.files] == ["1.png", "2.png"]
