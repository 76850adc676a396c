"""Vectors in the parts of outputs: what is written comes back, whatever else the rows have."""

from pathlib import Path

import pytest

from mmdeploy_llm.data.records.item import Vector
from mmdeploy_llm.data.records.record import Record
from tests.data.outputs.vectors import failed, made, written

FORMATS = ("jsonl", "lance", "parquet", "tar", "npy")


@pytest.mark.one_is_quick
@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("shape", [(4,), (3, 4)])
def test_vectors_come_back_exactly(tmp_path: Path, suffix: str, shape: tuple[int, ...]) -> None:
    records = [made(1, shape), failed(2), made(3, shape)]
    assert written(tmp_path / f"v.{suffix}", records) == records


@pytest.mark.parametrize("suffix", FORMATS)
def test_token_vectors_of_several_lengths_come_back(tmp_path: Path, suffix: str) -> None:
    records = [made(1, (1, 4)), made(2, (7, 4)), failed(3), made(4, (2, 4))]
    assert written(tmp_path / f"v.{suffix}", records) == records


@pytest.mark.parametrize("suffix", FORMATS[2:])
def test_a_part_without_vectors_has_the_column_of_the_others(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"v.{suffix}"
    records = [failed(1), failed(2), made(3), made(4), failed(5)]
    assert written(path, records, part_items=2) == records


def test_parquet_has_lists_of_one_size(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    written(tmp_path / "v.parquet", [failed(1), made(2)], part_items=1)
    for part in sorted((tmp_path / "v.parquet").glob("part-*")):
        kind = parquet.read_schema(part).field("embedding").type
        assert str(kind).startswith("fixed_size_list<")
        assert kind.list_size == 4


def test_vectors_of_two_sizes_come_back(tmp_path: Path) -> None:
    records = [made(1, (4,)), made(2, (6,))]
    assert written(tmp_path / "v.parquet", records, part_items=1) == records


@pytest.mark.parametrize("suffix", ["parquet", "npy", "lance"])
def test_an_item_that_is_done_again_has_its_new_vector_only(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"v.{suffix}"
    written(path, [made(1), failed(2), made(3)])
    again = written(path, [made(2)], "resume")
    assert [record.id for record in again] == ["item 1", "item 3", "item 2"]
    assert all(record.embedding is not None for record in again)


def test_a_carried_column_of_the_same_name_keeps_its_values(tmp_path: Path) -> None:
    record = Record(id="a", line=1, text="answer", columns={"embedding": [1.5, 2.5]})
    assert written(tmp_path / "v.parquet", [record]) == [record]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"shape": [4]}, "shape and float32"),
        ({"shape": [0], "float32": ""}, "neither"),
        ({"shape": [2, 2, 2], "float32": "A" * 44}, "neither"),
        ({"shape": [True], "float32": "AAAA"}, "neither"),
        ({"shape": [2**40], "float32": "AAAA"}, "neither"),
        ({"shape": [4], "float32": "AAAA"}, "has not the numbers"),
        ([1.0, 2.0], "not an object"),
    ],
)
def test_a_record_with_no_vector_in_its_place_is_refused(value: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Vector.from_json(value)
