"""Outputs of small batches: pictures in folders, answered by a fake."""

import json

import pytest
from PIL import Image

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.record import ItemError, Record


def record_at(path, text="a caption", **values):
    return Record(id=str(path), path=str(path), text=text, finish_reason="stop", **values)


def failed_at(path):
    return record_at(path, "", error=ItemError(code=400, kind="RequestError", message="no"))


def written(output, *records):
    """Writes records as an output of a batch; returns its name."""
    sink = open_sink(str(output))
    with sink.writer("new", Kept()) as writer:
        for number, record in enumerate(records, 1):
            writer.write(record, number)
        writer.finish(lambda record: record.line)
    return str(output)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder with three pictures, from which the test runs."""
    monkeypatch.chdir(tmp_path)
    for name in ("photos/a.png", "photos/b.jpg", "photos/sub/ä ö.png"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (len(name), 0, 0)).save(path)
    return tmp_path


@pytest.fixture
def captions(photos):
    """An output of three items, one of which has failed."""
    return written(
        photos / "captions.jsonl",
        record_at("photos/a.png", "a red square"),
        failed_at("photos/b.jpg"),
        record_at("photos/sub/ä ö.png", "zwei Kreise, größer"),
    )
