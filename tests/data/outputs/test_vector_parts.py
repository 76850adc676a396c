"""Vectors in the parts of outputs: what is written comes back, whatever else the rows have."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mmdeploy_llm.data.outputs.lance_store import LanceStore

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.item import Vector
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.errors import ConfigError


def made(number: int, shape: tuple[int, ...] = (4,)) -> Record:
    rows = np.random.default_rng(number).standard_normal(shape).astype("f4")
    return Record(id=f"item {number}", line=number, outcome="ok", embedding=Vector.of(rows))


def failed(number: int) -> Record:
    error = ItemError(code=400, kind="RequestError", message="broken")
    return Record(id=f"item {number}", line=number, error=error)


def written(
    path: Path, records: list[Record], mode: str = "new", **options: object
) -> list[Record]:
    sink = open_sink(path, **options)  # type: ignore[arg-type]
    kept = sink.scan(lambda record: record.line) if mode == "resume" else Kept()
    with sink.writer(mode, kept) as writer:  # type: ignore[arg-type]
        for record in records:
            writer.write(record, record.line)
        writer.finish(lambda record: record.line)
    return [entry.record for entry in open_sink(path, **options).entries()]  # type: ignore[arg-type]


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


def test_numpy_reads_the_parts_of_an_npy_output(tmp_path: Path) -> None:
    records = [failed(1), made(2), made(3), failed(4), made(5)]
    written(tmp_path / "v.npy", records, part_items=1)
    parts = sorted((tmp_path / "v.npy").glob("part-*"))
    assert [np.load(part).shape for part in parts] == [(0, 4), (1, 4), (1, 4), (0, 4), (1, 4)]
    whole = np.concatenate([np.load(part, mmap_mode="r") for part in parts])
    expected = [own.embedding.array() for own in records if own.embedding is not None]
    np.testing.assert_array_equal(whole, expected)


def test_an_npy_output_has_one_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"have 4 numbers, and that of 'item 2' has 6: an array"):
        written(tmp_path / "v.npy", [made(1), made(2, (6,))])
    kept = (tmp_path / "v.npy" / ".open-00000.jsonl").read_text().splitlines()
    assert len(kept) == 2  # nothing is lost


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:60], "not a .npy file"),
        (lambda data: data[:170], "is cut off: it has 170 bytes"),
        (lambda data: data[:-3], "its last record is cut off"),
        (lambda data: b"", "not a .npy file"),
        (lambda data: data.replace(b'"row": 1', b'"row": 7'), "line 2 is no record"),
        (lambda data: data.replace(b'"id": "item 1"', b'"id": [2]     '), "line 1 is no record"),
        (lambda data: data.replace(b"<f4", b"<i4"), "its array is int32"),
        (lambda data: data.replace(b"<f4", b"|O "), "not a .npy file|Python objects"),
        (lambda data: data[:140] + b"\x11\x22\x33\x44" + data[144:], "not the one that was"),
    ],
)
def test_a_damaged_npy_part_is_told(
    tmp_path: Path, damage: Callable[[bytes], bytes], words: str
) -> None:
    written(tmp_path / "v.npy", [made(1, (8,)), made(2, (8,))])
    part = tmp_path / "v.npy" / "part-00000.npy"
    part.write_bytes(damage(part.read_bytes()))
    with pytest.raises(ConfigError, match=words):
        list(open_sink(tmp_path / "v.npy").entries())


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


@pytest.fixture
def small_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lance")
    monkeypatch.setattr("mmdeploy_llm.data.outputs.lance_store.MAX_LINES", 2)


@pytest.mark.usefixtures("small_journal")
def test_a_lance_output_grows_version_by_version(tmp_path: Path) -> None:
    import lance

    records = [failed(1), failed(2), made(3), made(4), failed(5)]
    assert written(tmp_path / "v.lance", records) == records
    table = lance.dataset(str(tmp_path / "v.lance")).to_table()
    assert table.column("id").to_pylist() == [record.id for record in records]
    assert str(table.schema.field("embedding").type).startswith("fixed_size_list<")
    assert [row is None for row in table.column("embedding").to_pylist()] == [
        *(True, True, False, False, True)
    ]
    assert not (tmp_path / "v.lance.journal").exists()


@pytest.mark.usefixtures("small_journal")
def test_a_killed_lance_run_has_lost_nothing(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "v.lance")
    writer = sink.writer("new", Kept())
    for number in range(1, 6):
        writer.write(made(number), number)
    writer.close()
    journal = tmp_path / "v.lance.journal"
    # What a kill leaves between a new version and the end of the journal, and a torn line.
    copy = b"0\tvoid: the dataset has it\n" + journal.read_bytes() + b'9\t{"id": "to'
    journal.write_bytes(copy)
    sink = open_sink(tmp_path / "v.lance")
    assert [entry.record.id for entry in sink.entries()] == [f"item {n}" for n in range(1, 6)]
    assert journal.read_bytes() == copy
    assert next(iter(sink.records_at([4]))) == made(5)
    again = written(tmp_path / "v.lance", [made(6)], "resume")
    assert again == [made(number) for number in range(1, 7)]


def test_other_lance_datasets_are_refused(tmp_path: Path) -> None:
    lance, pyarrow = pytest.importorskip("lance"), pytest.importorskip("pyarrow")
    lance.write_dataset(pyarrow.table({"a": [1]}), str(tmp_path / "a.lance"))
    with pytest.raises(ConfigError, match="that `embed` has not written"):
        open_sink(tmp_path / "a.lance").check("resume")
    (tmp_path / "b.lance").mkdir()
    (tmp_path / "b.lance" / "x").write_text("")
    with pytest.raises(ConfigError, match="is no Lance dataset"):
        open_sink(tmp_path / "b.lance").check("resume")


@pytest.mark.parametrize(
    "data", [b"x\t{}\n", b"-1\t{}\n", b'0\t["a"]\n', b"0\t{\n", b"0\n", b"\n", b"0\t{\xff}\n"]
)
def test_a_file_that_is_no_journal_of_lance_is_refused(tmp_path: Path, data: bytes) -> None:
    pytest.importorskip("lance")
    (tmp_path / "v.lance.journal").write_bytes(data)
    with pytest.raises(ConfigError, match=r"is not the journal of this output: line 1 is no"):
        LanceStore(tmp_path / "v.lance", writable=True)
    assert (tmp_path / "v.lance.journal").read_bytes() == data


def test_a_folder_or_a_vast_file_is_no_journal_of_lance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lance")
    (tmp_path / "a.lance.journal").mkdir()
    (tmp_path / "b.lance.journal").write_bytes(b"0\t{}\n")
    monkeypatch.setattr("mmdeploy_llm.data.outputs.lance_store.MAX_JOURNAL", 4)
    for name in ("a.lance", "b.lance"):
        with pytest.raises(ConfigError, match="no file, or one of more than"):
            LanceStore(tmp_path / name, writable=True)


def test_a_disk_that_fills_up_tears_no_line_of_lances_journal(tmp_path: Path) -> None:
    pytest.importorskip("lance")
    store = LanceStore(tmp_path / "v.lance", writable=True)
    lines = [f'{{"id": "item {number}"}}' for number in range(3)]
    store.append(lines[0], {})
    journal = store._file
    assert journal is not None

    class Full:
        """Takes ten bytes, and no more."""

        num_calls = 0

        def write(self, data: memoryview) -> int:
            self.num_calls += 1
            if self.num_calls == 2:
                raise OSError(28, "No space left on device")
            return journal.write(data[:10] if self.num_calls == 1 else data)

        truncate, close = journal.truncate, journal.close

    store._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        store.append(lines[1], {})
    store.append(lines[2], {})
    store.close()
    found = LanceStore(tmp_path / "v.lance", writable=False).entries()
    assert [line for _, line in found] == [lines[0], lines[2]]
