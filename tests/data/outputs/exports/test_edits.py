"""Edits that the page of a report saves: `export` and `report` take them."""

import json

import pytest
from typer.testing import CliRunner

from mmdeploy_llm.cli import app
from mmdeploy_llm.data.outputs.exports.export import ExportOptions
from mmdeploy_llm.data.outputs.exports.formats import export_records
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError

from .conftest import failed_at, record_at, written

ONE = "photos/a.png"


def edits(path, *lines):
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return str(path)


def edit(item, text, before, **own):
    return {"id": item, **own, "text": text, "edited_from": before}


def texts(name):
    return {record.id: record.text for record in MergedOutputs([name]).records()}


@pytest.fixture
def outputs(photos):
    records = [record_at(ONE, "a cat"), record_at("photos/b.jpg", "a dog")]
    cut = Record(id="photos/c.png", path="photos/c.png", text="a bi", outcome="truncated")
    return written(photos / "captions.jsonl", *records, cut)


@pytest.mark.parametrize("form", ["all.jsonl", "all.parquet", "all.tar"])
def test_edited_texts_replace_those_of_the_output(outputs, photos, form):
    lines = edit(ONE, "A cat, 猫.", "a cat"), edit("photos/c.png", "a bird", "a bi")
    named = edits(photos / "captions.edited.jsonl", *lines)
    before = (photos / "captions.jsonl").read_bytes()
    found = export_records([outputs, named], form)
    assert found.notes[0] == f"2 texts are as edited in {named}"
    assert texts(form) == {ONE: "A cat, 猫.", "photos/b.jpg": "a dog", "photos/c.png": "a bird"}
    assert (photos / "captions.jsonl").read_bytes() == before


def test_a_text_that_a_person_has_corrected_is_no_longer_cut_off(outputs, photos):
    named = edits(photos / "e.jsonl", edit("photos/c.png", "a bird", "a bi"))
    options = ExportOptions(outcomes=frozenset(("ok",)))
    assert export_records([outputs], "before.jsonl", options=options).num_out == 2
    assert export_records([named, outputs], "after.jsonl", options=options).num_out == 3


def test_edits_of_newer_and_of_no_answers_are_told(outputs, photos):
    lines = edit(ONE, "a lion", "a tiger"), edit("nowhere.png", "x", "y")
    found = export_records([outputs, edits(photos / "e.jsonl", *lines)], "all.jsonl")
    assert f"  1 of an answer that is another one by now: {ONE}" in found.notes
    assert "  1 left out, of an item that no output has: nowhere.png" in found.notes
    assert texts("all.jsonl")[ONE] == "a lion"


def test_of_two_edits_the_later_one_counts(outputs, photos):
    lines = edit(ONE, "first", "a cat"), edit(ONE, "second", "a cat")
    export_records([outputs, edits(photos / "e.jsonl", *lines)], "all.jsonl")
    assert texts("all.jsonl")[ONE] == "second"


def test_a_line_without_an_id_is_named_by_its_number(photos):
    lines = written(photos / "lines.jsonl", Record(id=None, line=3, text="x", outcome="ok"))
    named = edits(photos / "e.jsonl", edit(None, "y", "x", line=3))
    export_records([lines, named], "all.jsonl")
    assert [record.text for record in MergedOutputs(["all.jsonl"]).records()] == ["y"]


def test_edits_beside_an_output_that_are_not_named_are_told(outputs, photos):
    edits(photos / "captions.edited.jsonl", edit(ONE, "y", "a cat"))
    found = export_records([outputs], "all.jsonl")
    assert "was not named: its edits are left out" in found.notes[0]
    assert texts("all.jsonl")[ONE] == "a cat"


@pytest.mark.parametrize(
    "line", [{"id": 1, "edited_from": "x"}, {"id": 1, "text": 5, "edited_from": "x"}, []]
)
def test_a_line_that_is_no_edit_is_told_with_its_number(outputs, photos, line):
    named = edits(photos / "e.jsonl", edit(ONE, "y", "a cat"), line)
    with pytest.raises(ConfigError, match="line 2 is no edit"):
        export_records([outputs, named], "all.jsonl")


def test_edits_alone_are_no_output(photos):
    named = edits(photos / "e.jsonl", edit(ONE, "y", "a cat"))
    with pytest.raises(ConfigError, match="name the output too"):
        export_records([named], "all.jsonl")


def test_sidecars_and_reports_take_them(outputs, photos):
    named = edits(photos / "e.jsonl", edit(ONE, "a lion", "a cat"))
    export_records([outputs, named], ".", form="sidecar")
    assert (photos / "photos" / "a.txt").read_text().strip() == "a lion"
    done = CliRunner().invoke(app, ["report", outputs, named, "-o", "page.html"])
    assert done.exit_code == 0, done.output
    assert "1 text is as edited in" in done.output
    page = (photos / "page.html").read_text()
    assert "a lion" in page
    assert "a cat" not in page


def test_failed_items_and_several_answers_keep_what_they_have(photos):
    answers = {"caption": "a cat", "count": "1"}
    asked = record_at(ONE, "a cat", answers=answers)
    output = written(photos / "o.jsonl", asked, failed_at("photos/b.jpg"))
    lines = edit(ONE, "x", "a cat"), edit("photos/b.jpg", "x", "")
    found = export_records([output, edits(photos / "e.jsonl", *lines)], "all.jsonl")
    assert found.notes[0].startswith("0 texts")
    assert "  2 left out, of an item that failed or has several answers: " in found.notes[1]
    assert texts("all.jsonl") == {ONE: "a cat", "photos/b.jpg": ""}


def test_an_emptied_caption_is_empty(outputs, photos):
    named = edits(photos / "e.jsonl", edit(ONE, " ", "a cat"))
    export_records([outputs, named], "all.jsonl")
    first = next(iter(MergedOutputs(["all.jsonl"]).records()))
    assert (first.id, first.outcome) == (ONE, "empty")


def test_an_edit_of_an_edit_corrects_the_same_answer(outputs, photos):
    one = edits(photos / "one.jsonl", edit(ONE, "first", "a cat"))
    two = edits(photos / "two.jsonl", edit(ONE, "second", "first"))
    found = export_records([outputs, one, two], "all.jsonl")
    assert found.notes[1:2] == ("  1 replaced by a later line of the same item",)
    assert texts("all.jsonl")[ONE] == "second"


def test_a_byte_order_mark_is_no_fault(outputs, photos):
    named = photos / "e.jsonl"
    named.write_text(json.dumps(edit(ONE, "y", "a cat")) + "\n", encoding="utf-8-sig")
    export_records([outputs, str(named)], "all.jsonl")
    assert texts("all.jsonl")[ONE] == "y"
