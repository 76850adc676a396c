"""The JSONL output: written line by line, resumed after a torn line, never lost by mistake."""

import errno

import pytest

from mmdeploy_llm.data.outputs.jsonl_writer import RecordWriter
from mmdeploy_llm.data.outputs.scan import (
    RecordIndex,
    check_target,
    read_records,
    records_at,
    scan,
)
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError

GOOD = Record(id="good", line=1, text="fine")
FAILED = Record(id="failed", line=2, error=ItemError(code=400, kind="RequestError", message="no"))


def place(record):
    return record.line


def write(file, mode, *records, **options):
    kept = scan(file, options.pop("place_of", place), **options) if mode == "resume" else None
    with RecordWriter(file, mode, kept) as writer:
        for record in records:
            writer.write(record, record.line)
        return writer.index


@pytest.fixture
def file(tmp_path):
    return tmp_path / "new folder" / "out.jsonl"


@pytest.fixture
def written(file):
    write(file, "new", GOOD, FAILED)
    return file


def test_a_new_file_never_replaces_one(written):
    with pytest.raises(ConfigError, match="--resume"):
        check_target(written, "new")
    with pytest.raises(ConfigError, match="--resume"):
        RecordWriter(written, "new")
    assert list(read_records(written)) == [GOOD, FAILED]


def test_overwrite_replaces(written):
    write(written, "overwrite", FAILED)
    assert list(read_records(written)) == [FAILED]


def test_resume_drops_what_is_done_again_and_keeps_the_bytes_of_others(written):
    before = written.read_bytes().splitlines(keepends=True)
    again = Record(id="failed", line=2, text="now it works")
    index = write(written, "resume", again)
    assert written.read_bytes().splitlines(keepends=True)[0] == before[0]
    assert list(read_records(written)) == [GOOD, again]
    assert index.num_failed == 0
    assert list(records_at(written, index.offsets())) == [GOOD, again]
    assert not list(written.parent.glob("*.partial"))


def test_a_file_system_without_locks_logs_a_warning(file, monkeypatch, caplog):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    write(file, "new", GOOD)
    assert list(read_records(file)) == [GOOD]
    assert "cannot be locked (No locks available)" in caplog.text


def test_what_another_run_wrote_meanwhile_is_not_lost(written):
    kept = scan(written, place)
    with written.open("a") as file:
        file.write(Record(id="other", line=3).to_json() + "\n")
    with pytest.raises(ConfigError, match="another run wrote"):
        RecordWriter(written, "resume", kept)
    assert [record.id for record in read_records(written)] == ["good", "failed", "other"]


def test_a_folder_is_no_target(tmp_path):
    with pytest.raises(ConfigError, match="folder"):
        check_target(tmp_path, "overwrite")


def test_the_index_gives_the_order_of_the_input_and_failures_first_of_too_many():
    index = RecordIndex()
    for line in (4, 2, 1, 3):
        error = ItemError(code=413, kind="MediaLimitError", message="x") if line == 3 else None
        own = Record(line=line, text="a", num_output_tokens=2, error=error)
        index.add(own, line, offset=line * 10)
    assert index.offsets() == [10, 20, 30, 40]
    assert index.offsets(2) == [10, 30]
    assert index.num_output_tokens == 8
    assert index.failures == {"413 MediaLimitError": 1}
