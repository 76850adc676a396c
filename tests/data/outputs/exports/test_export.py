"""`export`: between all formats of outputs, filtered, and each record accounted for."""

import json
import tarfile
from contextlib import contextmanager

import pytest

from mmdeploy_llm.data.outputs.csv_table import CsvSink
from mmdeploy_llm.data.outputs.exports import pictures
from mmdeploy_llm.data.outputs.exports.export import ExportOptions
from mmdeploy_llm.data.outputs.exports.formats import FORMATS, export_records, format_of
from mmdeploy_llm.data.outputs.openai import OpenAISink
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import claimed

from .conftest import record_at, written


@pytest.mark.one_is_quick
@pytest.mark.parametrize("first", ["one.jsonl", "one.parquet", "one.tar"])
@pytest.mark.parametrize("second", ["two.jsonl", "two.parquet", "two.tar"])
def test_outputs_of_batches_become_each_other(captions, first, second):
    before = list(MergedOutputs([captions]).records())
    export_records([captions], first)
    found = export_records([first], second)
    assert (found.num_in, found.num_out, found.num_left_out) == (3, 3, 0)
    assert list(MergedOutputs([second]).records()) == before


def test_a_tar_keeps_its_pictures_when_it_is_exported_again(captions, photos):
    export_records([captions], "one.tar")
    pictures = sorted(path.read_bytes() for path in photos.glob("photos/**/*.png"))
    for path in photos.glob("photos/**/*.*"):
        path.unlink()
    export_records(["one.tar"], "two.tar")
    with tarfile.open("two.tar/part-00000.tar") as tar:
        found = [tar.extractfile(m).read() for m in tar if m.name.endswith(".png")]
    assert sorted(found) == pictures


def test_each_record_is_written_or_left_out_for_a_reason(captions):
    options = ExportOptions(outcomes=frozenset(("ok",)))
    found = export_records([captions], "ok.jsonl", options=options)
    assert (found.num_in, found.num_out) == (3, 2)
    assert found.left_out == {"its outcome is failed": 1}


def test_of_an_item_in_two_outputs_the_older_record_is_told(captions, photos):
    later = written(photos / "later.jsonl", record_at("photos/b.jpg", "now it is"))
    found = export_records([captions, later], "all.jsonl")
    assert (found.num_in, found.num_out, found.num_left_out) == (4, 3, 1)
    assert [own.text for own in MergedOutputs(["all.jsonl"]).records()].count("now it is") == 1


def test_an_output_is_never_one_of_the_inputs(captions):
    for output in (captions, f"{captions}/x.jsonl", "./captions.jsonl"):
        with pytest.raises(ConfigError, match="read"):
            export_records([captions], output, options=ExportOptions(is_overwritten=True))


@pytest.mark.parametrize("made", ["answers.jsonl", "answers.csv"])
def test_the_records_beside_what_is_read_or_written_are_never_written(captions, photos, made):
    """`export` emptied them before it read them: all answers of a run were lost."""
    form = "openai" if made.endswith(".jsonl") else "csv"
    records = photos / f"{made}{OpenAISink.ending if form == 'openai' else CsvSink.ending}"
    options = ExportOptions(is_overwritten=True)
    export_records([captions], str(records), form="jsonl")
    before = records.read_bytes()
    with pytest.raises(ConfigError, match=r"read; write elsewhere|of the records in"):
        export_records([str(records)], made, form=form, options=options)
    (photos / made).write_bytes(b"")
    with pytest.raises(ConfigError, match="read; write elsewhere"):
        export_records([str(records)], f"{records}.config.json", form="jsonl", options=options)
    assert records.read_bytes() == before


def test_a_table_whose_records_lie_beside_it_is_not_replaced(captions, photos):
    written(photos / "a.csv", record_at("photos/b.jpg", "an answer"))
    options = ExportOptions(is_overwritten=True)
    with pytest.raises(ConfigError, match=r"the table of the records in 'a\.csv\.jsonl'"):
        export_records([captions], "a.csv", options=options)
    with pytest.raises(ConfigError, match=r"'a\.csv\.jsonl', which .* belongs to 'a\.csv'"):
        export_records(["a.csv"], "a.csv.jsonl", options=options)
    (kept,) = MergedOutputs(["a.csv"]).records()
    assert kept.text == "an answer"


@pytest.mark.full
def test_what_exists_stays_unless_it_is_to_be_replaced(captions):
    for own in ("x.jsonl", "x.parquet"):
        export_records([captions], own)
        with pytest.raises(ConfigError, match="exists already"):
            export_records([captions], own)
        export_records([captions], own, options=ExportOptions(is_overwritten=True))
        assert len(MergedOutputs([own]).index) == 3


def test_the_name_decides_the_format():
    assert format_of("a/b.jsonl").name == "jsonl"
    assert format_of("b.TAR/").name == "webdataset"
    assert format_of("b", "parquet").name == "parquet"
    with pytest.raises(ConfigError, match="says no format"):
        format_of("captions.xlsx")
    with pytest.raises(ConfigError, match="must be one of"):
        format_of("captions.jsonl", "xml")
    assert len({own.name for own in FORMATS}) == len(FORMATS)


def test_an_unknown_outcome_is_refused(captions):
    with pytest.raises(ConfigError, match="no outcome"):
        ExportOptions(outcomes=frozenset(("good",)))


def test_what_is_no_output_is_refused(photos):
    (photos / "x.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(ConfigError, match="not a record"):
        export_records(["x.jsonl"], "y.parquet")


def test_a_table_in_csv_tells_what_looks_like_a_formula(captions, photos):
    later = written(photos / "later.jsonl", record_at("photos/b.jpg", "=1+1"))
    found = export_records([captions, later], "all.csv")
    assert (photos / "all.csv").read_text().count("'=1+1") == 1
    assert found.notes == (
        "1 cells begin like a formula of a spreadsheet and have an apostrophe before them",
    )
    assert not (photos / "all.csv.jsonl").exists()


def test_a_table_that_is_no_output_is_told(captions, tmp_path):
    (tmp_path / "prices.csv").write_text("name,price\na,1\n")
    with pytest.raises(ConfigError, match=r"prices\.csv"):
        export_records([str(tmp_path / "prices.csv")], "two.jsonl")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ["csv", "coco", "imagefolder", "yolo", "kohya", "sidecar"])
def test_what_another_run_writes_is_left_to_it(captions, tmp_path, name):
    is_folder = name not in ("csv", "coco")
    out = tmp_path / "out"
    if is_folder:
        out.mkdir()
    before = sorted(tmp_path.rglob("*"))
    with (
        claimed(out, is_folder=is_folder, suffix=".txt" if name == "sidecar" else ""),
        pytest.raises(ConfigError, match=r"another run .* is writing to '.*out'"),
    ):
        export_records([captions], out, name, ExportOptions(is_overwritten=True))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.one_is_quick
@pytest.mark.parametrize("name", ["imagefolder", "yolo", "kohya"])
def test_what_another_run_has_written_meanwhile_stays(captions, tmp_path, name, monkeypatch):
    out = tmp_path / "out"

    @contextmanager
    def late(output, **options):
        out.mkdir()
        (out / "theirs").touch()
        with claimed(output, **options):
            yield

    monkeypatch.setattr(pictures, "claimed", late)
    with pytest.raises(ConfigError, match="has files already"):
        export_records([captions], out, name)
    assert [path.name for path in out.iterdir()] == ["theirs"]


def test_a_lock_that_a_killed_export_left_is_no_file_of_its_folder(captions, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").touch()
    assert export_records([captions], tmp_path / "out", "kohya").num_out


def test_null_in_a_line_is_no_value(photos):
    values = json.loads(record_at("photos/a.png").to_json())
    lacking = (
        "columns",
        "answers",
        "outputs",
        "boxes",
        "media",
        "media_notes",
        "num_tokens_by_kind",
    )
    line = json.dumps(values | dict.fromkeys(lacking))
    (photos / "c.jsonl").write_text(f"{line}\n{json.dumps(values | {'id': 'b', 'columns': {}})}\n")
    for name in ("t.csv", "t.parquet", "t.tar", "t.jsonl"):
        assert export_records(["c.jsonl"], name).num_out == 2
    for form in ("imagefolder", "kohya", "sidecar"):
        (photos / form).mkdir(exist_ok=True)
    assert export_records(["c.jsonl"], "imagefolder", "imagefolder").num_out == 2
    assert export_records(["c.jsonl"], "kohya", "kohya").num_out == 2
