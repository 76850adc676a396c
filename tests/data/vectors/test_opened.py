"""Files of vectors: outputs of `embed`, tables and arrays of others, and what is wrong there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.item import Vector
from mmdeploy_llm.data.records.record import ItemError, Record
from mmdeploy_llm.data.records.state import RunState
from mmdeploy_llm.data.vectors.nearest import nearest
from mmdeploy_llm.data.vectors.opened import Vectors
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable.files import make_fifo

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype("f4")


def record(number: int, vector: np.ndarray | None) -> Record:
    if vector is not None:
        return Record(id=f"i{number}", line=number, outcome="ok", embedding=Vector.of(vector))
    error = ItemError(code=400, kind="RequestError", message="broken")
    return Record(id=f"i{number}", line=number, error=error)


def write(path: Path, vectors: list[np.ndarray | None], **options: object) -> str:
    sink = open_sink(path, **options)  # type: ignore[arg-type]
    with sink.writer("new", Kept()) as writer:
        for number, own in enumerate(vectors):
            writer.write(record(number, own), number)
        writer.finish(lambda own: own.line)
    return str(path)


def read(*names: str, column: str | None = None) -> tuple[list[int], np.ndarray]:
    blocks = list(Vectors(names, column).blocks())
    numbers = [number for block in blocks for number in block.numbers.tolist()]
    return numbers, np.concatenate([block.rows for block in blocks])


@pytest.mark.one_is_quick
@pytest.mark.parametrize("suffix", ["jsonl", "lance", "parquet", "npy", "tar"])
@pytest.mark.parametrize("tokens", [(), (3,)])
def test_an_output_is_read_whatever_its_format(
    tmp_path: Path, suffix: str, tokens: tuple[int, ...]
) -> None:
    own = [random(*tokens, 4, seed=number) for number in range(5)]
    vectors = [own[0], None, own[1], own[2], None, own[3], own[4]]
    path = tmp_path / f"v.{suffix}"
    name = write(path, vectors, **({} if suffix in ("jsonl", "lance") else {"part_items": 2}))
    numbers, rows = read(name)
    assert numbers == [0, 2, 3, 5, 6]
    np.testing.assert_array_equal(rows, np.concatenate([np.atleast_2d(each) for each in own]))
    found = Vectors([name]).records([6, 0, 4])
    assert [each.id for each in found] == ["i6", "i0", "i4"]
    assert not found[2].is_ok


def test_what_is_not_in_a_part_yet_is_read_too(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "v.parquet", part_items=2)
    rows = random(3, 4)
    writer = sink.writer("new", Kept())
    for number, own in enumerate(rows):
        writer.write(record(number, own), number)
    writer.close()  # as a killed run leaves it
    numbers, found = read(str(tmp_path / "v.parquet"))
    assert numbers == [0, 1, 2]
    np.testing.assert_array_equal(found, rows)
    assert [own.id for own in Vectors([str(tmp_path / "v.parquet")]).records([2, 1])] == [
        "i2",
        "i1",
    ]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("number", ["halffloat", "float", "double"])
@pytest.mark.parametrize("size", [-1, 4])
def test_a_table_of_others_is_read(tmp_path: Path, number: str, size: int) -> None:
    rows = random(6, 4)
    kinds = {"halffloat": pyarrow.float16(), "float": pyarrow.float32()}
    kind = kinds.get(number, pyarrow.float64())
    lists = [row.astype(kind.to_pandas_dtype()).tolist() for row in rows]
    column = pyarrow.array([*lists[:3], None, *lists[3:]], pyarrow.list_(kind, size))
    table = pyarrow.table({"id": list("abcdefg"), "vec": column, "path": [__file__] * 7})
    parquet.write_table(table, tmp_path / "t.parquet", row_group_size=3)
    numbers, found = read(str(tmp_path / "t.parquet"))
    assert numbers == [0, 1, 2, 4, 5, 6]
    np.testing.assert_allclose(found, rows, atol=1e-2 if number == "halffloat" else 1e-6)
    (own,) = Vectors([str(tmp_path / "t.parquet")]).records([4])
    assert (own.id, own.path) == ("e", __file__)


def test_a_column_is_named_where_there_are_two(tmp_path: Path) -> None:
    rows = random(3, 4)
    table = pyarrow.table({"a": rows.tolist(), "b": (rows + 1).tolist()})
    parquet.write_table(table, tmp_path / "t.parquet")
    name = str(tmp_path / "t.parquet")
    with pytest.raises(ConfigError, match="it has a, b; name one with --column"):
        Vectors([name])
    np.testing.assert_allclose(read(name, column="b")[1], rows + 1, rtol=1e-6)
    with pytest.raises(ConfigError, match="no column 'c' with lists of numbers; it has: a, b"):
        Vectors([name], "c")


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4"])
def test_an_array_of_others_is_read(tmp_path: Path, dtype: str) -> None:
    rows = random(5, 4)
    np.save(tmp_path / "a.npy", rows.astype(dtype))
    numbers, found = read(str(tmp_path / "a.npy"))
    assert numbers == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(found, rows, atol=1e-2 if dtype == "f2" else 1e-6)
    assert [own.id for own in Vectors([str(tmp_path / "a.npy")]).records([4])] == [5]


def test_ids_of_an_array_stand_beside_it(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", random(2, 4))
    (tmp_path / "a.ids.txt").write_text("x\ny\n")
    assert [own.id for own in Vectors([str(tmp_path / "a.npy")]).records([1])] == ["y"]
    (tmp_path / "a.ids.txt").write_text("x\n")
    with pytest.raises(ConfigError, match=r"has 1 ids, and .* has 2 rows"):
        Vectors([str(tmp_path / "a.npy")])
    (tmp_path / "a.ids.txt").write_bytes("x\x85\u2028z\r\ny".encode())  # no lines of their own
    names = [own.id for own in Vectors([str(tmp_path / "a.npy")]).records([0, 1])]
    assert names == ["x\x85\u2028z", "y"]
    (tmp_path / "a.ids.txt").write_bytes(b"\xff\ny\n")
    with pytest.raises(ConfigError, match="must be text in UTF-8"):
        Vectors([str(tmp_path / "a.npy")])


def test_shards_of_others_are_read_in_their_order(tmp_path: Path) -> None:
    rows = random(6, 4)
    for number, name in enumerate(("s2.npy", "s10.npy", "s11.npy")):
        np.save(tmp_path / name, rows[2 * number : 2 * number + 2])
    numbers, found = read(str(tmp_path))
    assert numbers == [0, 1, 2, 3, 4, 5]
    np.testing.assert_array_equal(found, rows)
    assert [own.id for own in Vectors([str(tmp_path)]).records([0, 3])] == [1, 4]


def test_vectors_that_are_not_finite_are_left_out_and_told(tmp_path: Path) -> None:
    rows = random(4, 4)
    rows[1, 2], rows[3, 0] = np.nan, np.inf
    name = write(tmp_path / "v.parquet", list(rows))
    vectors = Vectors([name])
    (hits,) = nearest(vectors.blocks(), [rows[0]], 9)
    assert [hit.number for hit in hits] == [0, 2] or [hit.number for hit in hits] == [0, 2][::-1]
    assert vectors.notes() == ["2 vectors are not finite and were left out: 'i1', 'i3'"]


def test_an_id_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    rows = random(3, 4)
    first = write(tmp_path / "a.parquet", list(rows))
    second = write(tmp_path / "b.jsonl", [rows[1]])
    vectors = Vectors([first, second])
    numbers = [number for block in vectors.blocks() for number in block.numbers]
    assert numbers == [1, 2, 3]
    assert "1 items are there again under the same id: the last one counts" in vectors.notes()


def test_what_is_missing_is_told(tmp_path: Path) -> None:
    name = write(tmp_path / "v.parquet", list(random(3, 4)))
    RunState(ending="running", total=9, shard=2, num_shards=4, output=name).write(
        tmp_path / "v.parquet" / ".state.json"
    )
    notes = Vectors([name]).notes()
    assert notes == [
        f"{name} has 3 of 9 items: its run is not complete",
        "no output of 1, 3, 4 was given",
    ]


def test_sizes_that_differ_are_told(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", list(random(2, 4)))
    np.save(tmp_path / "b.npy", random(2, 6))
    with pytest.raises(ConfigError, match="has vectors of 4 numbers, and from 3 on 6: they are of"):
        list(Vectors([first, str(tmp_path / "b.npy")]).blocks())
    other = write(tmp_path / "c.parquet", [random(3, 4)])
    with pytest.raises(ConfigError, match="one vector of some items and several of others"):
        list(Vectors([first, other]).blocks())
    mixed = write(tmp_path / "d.jsonl", [random(4), random(6)])
    with pytest.raises(ConfigError, match="vectors have 4 numbers and 6 numbers"):
        list(Vectors([mixed]).blocks())
    ragged = pyarrow.table({"v": [[1.0, 2.0], [1.0]]})
    parquet.write_table(ragged, tmp_path / "r.parquet")
    with pytest.raises(ConfigError, match="rows 1 to 2: vectors have 1 numbers and 2 numbers"):
        list(Vectors([str(tmp_path / "r.parquet")]).blocks())


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "npy"])
def test_an_output_without_a_vector_has_no_blocks(tmp_path: Path, suffix: str) -> None:
    vectors = Vectors([write(tmp_path / f"v.{suffix}", [None, None])])
    assert list(vectors.blocks()) == []
    assert vectors.num_items == 2


def test_files_of_no_rows_have_no_blocks(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((0, 4), "f4"))
    empty = pyarrow.table({"v": pyarrow.array([], pyarrow.list_(pyarrow.float32(), 4))})
    parquet.write_table(empty, tmp_path / "t.parquet")
    for name in ("a.npy", "t.parquet"):
        assert list(Vectors([str(tmp_path / name)]).blocks()) == []


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: folder / "none.npy", "does not exist; name an output of `embed`"),
        (lambda folder: saved(folder, np.zeros(4, "f4")), r"float32 \[4\]; vectors are"),
        (lambda folder: saved(folder, np.zeros((2, 3), "u1")), r"an array of uint8 \[2, 3\]"),
        (lambda folder: saved(folder, np.zeros((2, 3), "f4").T), "column by column"),
        (lambda folder: saved(folder, np.array([[None]])), "Python objects"),
        (lambda folder: saved(folder, random(9, 9), 200), "is cut off: it has 200 bytes"),
        (lambda folder: saved(folder, random(9, 9), 20), "is not a .npy file"),
        (lambda folder: table(folder, 100), "cannot be read as Parquet"),
        (lambda folder: table(folder, 0), "cannot be read as Parquet"),
        (lambda folder: other(folder), "a column with vectors.* it has none; its columns: text"),
    ],
)
def test_files_that_hold_no_vectors_are_told(
    tmp_path: Path, make: Callable[[Path], Path], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        list(Vectors([str(make(tmp_path))]).blocks())


def saved(folder: Path, array: np.ndarray, size: int | None = None) -> Path:
    np.save(folder / "a.npy", array, allow_pickle=True)
    if size is not None:
        cut(folder / "a.npy", size)
    return folder / "a.npy"


def table(folder: Path, size: int) -> Path:
    parquet.write_table(pyarrow.table({"v": random(50, 4).tolist()}), folder / "t.parquet")
    cut(folder / "t.parquet", size)
    return folder / "t.parquet"


def other(folder: Path) -> Path:
    parquet.write_table(pyarrow.table({"text": ["a"]}), folder / "t.parquet")
    return folder / "t.parquet"


@pytest.mark.parametrize("header", ["(((", "'''", "{'descr': '<f4', 'x': ", "  x\n y", "-" * 9000])
def test_a_header_that_python_cannot_read_is_told(tmp_path: Path, header: str) -> None:
    data = header.encode() + b"\n"
    start = b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(start + data + bytes(64))
    with pytest.raises(ConfigError, match=r"is not a \.npy file"):
        Vectors([str(tmp_path / "a.npy")])


@pytest.mark.parametrize("shape", ["(True, 3)", "(-1, 3)", "(-1, -3)"])
def test_a_shape_of_other_numbers_is_told(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}\n".encode()
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    (tmp_path / "a.npy").write_bytes(start + header + bytes(64))
    with pytest.raises(ConfigError, match=r"is not a \.npy file: its shape is"):
        Vectors([str(tmp_path / "a.npy")])


def test_a_fifo_is_told_and_not_waited_for(tmp_path: Path) -> None:
    make_fifo(tmp_path / "a.npy")
    with pytest.raises(ConfigError, match="is no regular file"):
        Vectors([str(tmp_path / "a.npy")])
