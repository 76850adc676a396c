"""Boxes as COCO and YOLO: pixels, shares of the picture, stable ids, and each record counted."""

import json
from dataclasses import replace

import pytest

from mmdeploy_llm.data.outputs.exports.export import ExportOptions
from mmdeploy_llm.data.outputs.exports.formats import export_records
from mmdeploy_llm.errors import ConfigError

from .conftest import failed_at, record_at, written


def found_at(path, *labels):
    box = [200.0, 100.0, 600.0, 500.0]
    boxes = tuple({"label": label, "box": box} for label in labels)
    return record_at(path, "an answer", boxes=boxes, picture_size=(2000, 1000))


@pytest.fixture
def found(tmp_path, monkeypatch):
    """An output with boxes, one without any, and records whose boxes were not read."""
    monkeypatch.chdir(tmp_path)
    return written(
        tmp_path / "found.jsonl",
        found_at("photos/a.png", "dog", "cat"),
        found_at("photos/sub/b.png"),
        found_at("photos/c.png", "", " a\n tall  tree\ud800"),
        record_at("photos/d.png"),
        failed_at("photos/e.png"),
    )


def test_coco(found):
    summary = export_records([found], "found.coco.json")
    assert summary.format == "coco"
    assert (summary.num_in, summary.num_out) == (5, 3)
    assert sorted(summary.left_out.values()) == [1, 1]
    assert summary.notes == ("4 boxes of 4 classes in 2 pictures, 1 have none",)
    with open("found.coco.json", encoding="utf-8") as file:
        values = json.load(file)
    assert [own["name"] for own in values["categories"]] == [
        "a tall tree\ufffd",
        "cat",
        "dog",
        "object",
    ]
    assert [own["file_name"] for own in values["images"]] == [
        "photos/a.png",
        "photos/sub/b.png",
        "photos/c.png",
    ]
    assert values["images"][0]["width"] == 2000
    assert values["annotations"][0]["bbox"] == [200, 100, 400, 400]
    assert values["annotations"][0]["category_id"] == 3


def test_yolo(found, tmp_path):
    summary = export_records([found], "out", "yolo")
    assert (summary.num_in, summary.num_out) == (5, 3)
    assert (tmp_path / "out/classes.txt").read_text() == "a tall tree\ufffd\ncat\ndog\nobject\n"
    lines = (tmp_path / "out/labels/photos/a.txt").read_text().splitlines()
    box = "0.200000 0.300000 0.200000 0.400000"
    assert lines == [f"2 {box}", f"1 {box}"]
    assert (tmp_path / "out/labels/photos/sub/b.txt").read_text() == ""
    assert not (tmp_path / "out/labels/photos/d.txt").exists()


@pytest.mark.full
def test_ids_are_the_same_in_any_order_and_stay_in_a_folder(found, tmp_path):
    """Texts of an earlier export keep their meaning."""
    again = written(tmp_path / "again.jsonl", found_at("x.png", "ant", "dog"))
    export_records([found], "out", "yolo")
    with pytest.raises(ConfigError, match="has files already"):
        export_records([again], "out", "yolo")
    export_records([again], "out", "yolo", ExportOptions(is_overwritten=True))
    names = (tmp_path / "out/classes.txt").read_text().splitlines()
    assert names[2:] == ["dog", "object", "ant"]
    assert (tmp_path / "out/labels/x.txt").read_text()[:1] == "4"
    turned = written(tmp_path / "turned.jsonl", found_at("x.png", "b"), found_at("y.png", "a"))
    export_records([turned], "other", "yolo")
    assert (tmp_path / "other/classes.txt").read_text() == "a\nb\n"


def test_names_lead_nowhere_else(tmp_path, monkeypatch):
    """A text is beneath the folder; of two pictures of one name the second is told."""
    monkeypatch.chdir(tmp_path)
    names = ("../../up.png", "a.png", "a.JPG", "/etc/passwd.png", "./b.png")
    output = written(tmp_path / "in.jsonl", *(found_at(name, "x") for name in names))
    summary = export_records([output], "out", "yolo")
    assert summary.left_out == {"another picture has its name, but for the suffix": 1}
    long = written(tmp_path / "long.jsonl", replace(found_at("é" * 5000, "x"), path=None))
    assert export_records([long], "long", "yolo").num_out == 1
    texts = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("out/**/*.txt"))
    assert texts == [
        "out/classes.txt",
        *(f"out/labels/{name}.txt" for name in ("a", "b", "passwd", "up")),
    ]


def test_options_without_an_effect_are_errors(found):
    with pytest.raises(ConfigError, match="no effect"):
        export_records([found], "x.coco.json", options=ExportOptions(part_items=5))
