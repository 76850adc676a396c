"""The JSONL file: flushed by line, resumed after a torn one, never lost by mistake."""

import pytest

from mmdeploy_llm.batch.records import CaptionRecord, ItemError
from mmdeploy_llm.batch.writer import RecordWriter, check_target, paths_done, read_records
from mmdeploy_llm.errors import ConfigError

GOOD = CaptionRecord(path="good.png", text="fine")
FAILED = CaptionRecord(path="failed.png", error=ItemError(code=400, message="no"))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "new folder" / "out.jsonl"


@pytest.fixture
def written(file):
    with RecordWriter(file, "new") as writer:
        writer.write(GOOD)
        writer.write(FAILED)
    return file


def test_a_line_is_there_before_the_next_comes(file):
    writer = RecordWriter(file, "new")
    writer.write(GOOD)
    assert list(read_records(file)) == [GOOD]
    writer.close()


def test_a_new_file_never_replaces_one(written):
    for attempt in (lambda: check_target(written, "new"), lambda: RecordWriter(written, "new")):
        with pytest.raises(ConfigError, match="--resume"):
            attempt()
    assert list(read_records(written)) == [GOOD, FAILED]


def test_overwrite_replaces(written):
    with RecordWriter(written, "overwrite") as writer:
        writer.write(FAILED)
    assert list(read_records(written)) == [FAILED]


def test_done_are_those_without_error(written):
    assert paths_done(written) == {"good.png"}


def test_resume_keeps_others_and_drops_what_is_done_again(written):
    again = CaptionRecord(path="failed.png", text="now it works")
    with RecordWriter(written, "resume", {"failed.png"}) as writer:
        assert list(read_records(written)) == [GOOD]
        writer.write(again)
    assert list(read_records(written)) == [GOOD, again]


def test_resume_drops_a_torn_last_line(written):
    with written.open("a") as file:
        file.write('{"path": "torn.png", "te')
    assert list(read_records(written)) == [GOOD, FAILED]
    with RecordWriter(written, "resume") as writer:
        writer.write(CaptionRecord(path="torn.png"))
    assert [record.path for record in read_records(written)] == [
        "good.png",
        "failed.png",
        "torn.png",
    ]


def test_resume_without_a_file_starts_one(file):
    with RecordWriter(file, "resume") as writer:
        writer.write(GOOD)
    assert list(read_records(file)) == [GOOD]


def test_a_file_of_something_else_is_left_alone(written):
    written.write_text('{"name": "not ours"}\n')
    with pytest.raises(ConfigError, match=r"line 1 .* is no caption record"):
        RecordWriter(written, "resume")
    assert written.read_text() == '{"name": "not ours"}\n'


def test_a_folder_is_no_target(tmp_path):
    with pytest.raises(ConfigError, match="folder"):
        check_target(tmp_path, "overwrite")
