"""Parquet has a column for each answer and carried column, with a type that all parts share."""

import json

import pytest

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.columns import Columns, Kind, kind_of, widened
from mmdeploy_llm.data.records.configuration import Configuration
from mmdeploy_llm.data.records.record import Record

pyarrow = pytest.importorskip("pyarrow")


def record(number, **columns):
    return Record(id=f"item {number}", line=number, text="x", columns=columns)


def written(path, records, part_items=1, mode="new"):
    sink = open_sink(str(path), part_items=part_items)
    kept = sink.scan(lambda own: own.line) if mode == "resume" else Kept()
    with sink.writer(mode, kept) as writer:
        for own in records:
            writer.write(own, own.line)
        writer.finish(lambda own: own.line)
    return MergedOutputs([str(path)])


def table_of(path):
    from pyarrow import dataset

    return dataset.dataset(str(path)).to_table().sort_by("line")


ROWS = [
    record(1, n=None, title=None, tags=[], box=None, mixed="a"),
    record(2, n=2, title="b", tags=["x", "y"], box={"x": 1}, mixed=None),
    record(3, n=2.5, title="c", tags=["z"], box={"x": 1.5, "label": "cat"}, mixed=[1, "b"]),
    record(4, n=7, title="=d", tags=None, box={}, mixed=3),
]


def test_a_column_has_one_type_in_all_parts_also_when_the_first_has_no_value(tmp_path):
    path = tmp_path / "out.parquet"
    merged = written(path, ROWS)
    table = table_of(path)
    assert table["n"].to_pylist() == [None, 2.0, 2.5, 7.0]
    assert table["title"].to_pylist() == [None, "b", "c", "=d"]
    assert table["tags"].to_pylist() == [[], ["x", "y"], ["z"], None]
    assert table.schema.field("tags").type == pyarrow.list_(pyarrow.string())
    assert table["box"].to_pylist()[2] == {"x": 1.5, "label": "cat"}
    assert table["mixed"].to_pylist() == ["a", None, '[1, "b"]', "3"]
    schemas = {pyarrow.parquet.read_schema(own).to_string() for own in path.glob("*.parquet")}
    assert len(schemas) == 1
    assert list(merged.records()) == ROWS


def test_a_run_that_is_resumed_widens_what_earlier_parts_have(tmp_path):
    path = tmp_path / "out.parquet"
    written(path, ROWS[:2])
    before = pyarrow.parquet.read_schema(path / "part-00000.parquet")
    merged = written(path, ROWS[2:], mode="resume")
    assert before.field("n").type == pyarrow.int64()
    assert table_of(path)["n"].to_pylist() == [None, 2.0, 2.5, 7.0]
    assert list(merged.records()) == ROWS


def test_names_that_are_taken_are_others(tmp_path):
    rows = [record(1, Text="own", id=5, text=1, columns="c", more=True, **{"": "empty"})]
    merged = written(tmp_path / "out.parquet", rows)
    table = table_of(tmp_path / "out.parquet")
    assert table["column_id"].to_pylist() == [5]
    assert {"column_Text", "column_text_2", "columns", "column_more"} <= set(table.column_names)
    assert list(merged.records()) == rows


@pytest.mark.one_is_quick
@pytest.mark.parametrize(
    "values",
    [
        {"answers": {"caption": "a", "n": 1}, "columns": {"caption": "b"}},
        {"answers": {"big": 2**70, "low": -(2**63), "deep": [[[[[[[[1]]]]]]]]}},
        {"columns": {"n": [{"a": 1}, {"b": None}, {}], "e": {}, "l": [[], None, [1, 2.5]]}},
        {"boxes": [{"label": "cat", "box": [1, 2, 3, 4]}], "video": {"frames": 3}, "odd": None},
        {"columns": {f"c{number}": number for number in range(700)}},
        {"columns": {"many": {f"k{number}": number for number in range(200)}}},
        {"columns": {"exact": 2**60, "half": 0.5, "yes": True, "none": None}},
    ],
)
def test_every_value_comes_back(tmp_path, values):
    from mmdeploy_llm.data.outputs.parquet import (
        ParquetParts,
        columns_of,
        new_columns,
        row_of,
        values_of,
    )

    line = Record(id="a").to_values()
    later = {"columns": {"exact": 0.25, "l": "text"}, "answers": {"n": "x"}, "boxes": []}
    columns = new_columns()
    columns.add(values)
    columns.add(later)
    form = ParquetParts(None)
    form._columns = columns
    rows = [row_of({**line, **own}, columns) for own in (values, later)]
    table = pyarrow.Table.from_pylist(rows, schema=form.schema)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    back = pyarrow.parquet.read_table(tmp_path / "a.parquet")
    kinds = columns_of(back.schema)
    assert list(kinds.items()) == list(columns.items())
    for own, row in zip((values, later), back.to_pylist(), strict=True):
        found = {name: value for name, value in values_of(row, kinds).items() if value is not None}
        wanted = {n: v for n, v in {**line, **own}.items() if v is not None}
        assert json.loads(json.dumps(found)) == json.loads(json.dumps(wanted))


def test_kinds_widen():
    assert kind_of([1, None, 2.5]).to_json() == ["float"]
    assert kind_of({"a": [1], "b": {"c": "x"}}).to_json() == {"a": ["int"], "b": {"c": "text"}}
    assert widened(kind_of(True), kind_of(1)).name == "text"
    assert widened(kind_of([]), kind_of([1])).to_json() == ["int"]
    assert Kind.from_json(kind_of({"a": [{"b": None}]}).to_json()) == kind_of({"a": [{"b": None}]})
    for wrong in ("date", [], 3, ["int", "int"]):
        with pytest.raises(ValueError, match="no kind"):
            Kind.from_json(wrong)
    own = Columns(fixed=("id",), fields=("id",))
    own.add({"columns": {"ID": 1, "Id": 2}})
    assert [name for name, _, _ in own.items()] == ["column_ID", "column_Id_2"]


def test_parts_that_a_run_has_written_are_not_opened_again(tmp_path, monkeypatch):
    from mmdeploy_llm.data.records.shelves import LocalShelf

    opened = []
    known = LocalShelf.open
    monkeypatch.setattr(LocalShelf, "open", lambda *own: opened.append(own[1]) or known(*own))
    same = [record(number, n=number) for number in range(1, 5)]
    sink = open_sink(str(tmp_path / "out.parquet"), part_items=1)
    with sink.writer("new", Kept()) as writer:
        sink.configurations.write(Configuration(), (), is_new=True)
        for own in same:
            writer.write(own, own.line)
        writer.finish(lambda own: own.line)
    assert opened == []
