"""Damaged and hostile tables: a fault is one row's, else one batch's, row group's or file's; every
other row is read once, and this process lives."""

import os
import random
import signal

import pytest

from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.rows import BadItem, FirstLines
from mmdeploy_llm.data.rows.tables import remote
from mmdeploy_llm.data.rows.tables.places import Place
from mmdeploy_llm.errors import ConfigError

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")
parquet = pytest.importorskip("pyarrow.parquet")

NUM_ROWS, AT = 40, 20


def cells(kind, value):
    """A column whose row AT has a value that Python cannot hold."""
    whole = pyarrow.int64() if kind.bit_width == 64 else pyarrow.int32()
    values = [value if number == AT else 0 for number in range(NUM_ROWS)]
    return pyarrow.array(values, whole).view(kind)


def not_utf8(kind=None):
    texts = [b"\xff\xfe" if number == AT else b"ok" for number in range(NUM_ROWS)]
    array = pyarrow.array(texts, pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), NUM_ROWS, array.buffers())


COLUMNS = {
    "date32": cells(pyarrow.date32(), 2**31 - 1),
    "date64": cells(pyarrow.date64(), 2**62),
    "timestamp": cells(pyarrow.timestamp("us"), 2**62),
    "duration": cells(pyarrow.duration("s"), 2**62),
    "time": cells(pyarrow.time64("us"), 2**50),
    "text": not_utf8(),
    "struct": pyarrow.StructArray.from_arrays([not_utf8()], ["path"]),
    "list": pyarrow.ListArray.from_arrays(list(range(NUM_ROWS + 1)), not_utf8()),
}


def write(path, table, **options):
    if path.suffix == ".parquet":
        parquet.write_table(table, path, **options)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, **options)
    return path


def check_once(rows, num_rows=NUM_ROWS):
    """Every row is there once, in order."""
    assert [row.line for row in rows] == list(range(1, num_rows + 1))


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_cell_that_python_cannot_hold_is_an_error_of_its_row(read, tmp_path, suffix):
    """One file has two columns for each kind, so that a process is started for each suffix only:
    the fault of a column is told for its own row, the others are read."""
    for name, column in COLUMNS.items():
        write(tmp_path / f"{name}.{suffix}", pyarrow.table({"x": column}))
    rows = read(tmp_path)
    num_files = len(rows) // NUM_ROWS
    check_once(rows, num_files * NUM_ROWS)
    bad = [row for row in rows if isinstance(row, BadItem)]
    assert [row.line for row in bad] == [NUM_ROWS * n + AT + 1 for n in range(num_files)]
    assert all("the column 'x'" in row.message for row in bad)


def test_what_cannot_be_told_by_row_is_an_error_of_its_batch(read, tmp_path):
    values = pyarrow.array(["a", "bc"])
    bad = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, values.buffers()[1], pyarrow.py_buffer(b"\xff\xff\xff")]
    )
    columns = [pyarrow.DictionaryArray.from_arrays([0, 1, 0], each) for each in (values, bad)]
    for number, column in enumerate((*columns, columns[0])):
        write(tmp_path / f"{number}.arrow", pyarrow.table({"x": column}))
    rows = read(tmp_path)
    assert [row.line for row in rows] == [1, 2, 3, 4, 7, 8, 9]
    assert [row.id for row in rows if isinstance(row, BadItem)] == ["1.arrow batch 0"]


@pytest.mark.full
def test_a_zone_that_is_unknown_here_is_utc(read, tmp_path):
    column = pyarrow.array([0], pyarrow.timestamp("us", tz="Foo/Bar"))
    (row,) = read(write(tmp_path / "a.parquet", pyarrow.table({"x": column})))
    assert str(row.values["x"]) == "1970-01-01 00:00:00+00:00"


@pytest.mark.full
def test_values_are_those_that_pyarrow_gives(read, tmp_path):
    import datetime
    import decimal

    rows = [
        {
            "bytes": b"\x00\xff" * 9,
            "date": datetime.date(2020, 2, 29),
            "when": datetime.datetime(2020, 1, 2, 3, 4, 5, 678),
            "zoned": datetime.datetime(2020, 1, 2, tzinfo=datetime.UTC),
            "time": datetime.time(1, 2, 3),
            "long": datetime.timedelta(days=-3, microseconds=7),
            "exact": decimal.Decimal("123.4500"),
            "number": 2**63 - 1,
            "real": 0.1,
            "never": float("inf"),
            "many": [[1, None], [], [b"x"[0]]],
            "deep": {"a": {"b": [{"c": b"y"}]}},
            "truth": True,
            "text": "\u2028 \U0001f600 \x00",
        }
    ] * 3
    table = pyarrow.Table.from_pylist(rows)
    found = read(write(tmp_path / "a.arrow", table))
    assert [row.values for row in found] == [
        {**row, "many": [[1, None], [], [120]]} for row in table.to_pylist()
    ]


@pytest.mark.full
def test_offsets_that_lead_outside_yield_no_foreign_bytes(read, tmp_path):
    """An IPC file is not checked by the library: offsets were followed wherever they lead."""
    table = pyarrow.table({"x": [f"text {n}" for n in range(NUM_ROWS)], "n": list(range(NUM_ROWS))})
    path = write(tmp_path / "a.arrow", table)
    good = bytearray(path.read_bytes())
    offsets = good.index(b"".join(n.to_bytes(4, "little") for n in (0, 6, 12, 18)))
    blob = bytearray(good)
    blob[offsets + 4 * AT : offsets + 4 * AT + 4] = (2**30).to_bytes(4, "little")
    path.write_bytes(blob)
    rows = read(path)
    check_once(rows)
    bad = [row.line for row in rows if isinstance(row, BadItem)]
    assert bad == [AT, AT + 1]  # the rows that it ends and begins
    blob[offsets : offsets + 4 * NUM_ROWS] = b"\x7f" * (4 * NUM_ROWS)
    path.write_bytes(blob)
    rows = read(path)
    assert all(isinstance(row, BadItem) for row in rows)


def varint(number):
    """A number as the footer of Parquet writes it."""
    number, found = number * 2, b""
    while number > 127:
        found, number = found + bytes([number & 127 | 128]), number >> 7
    return found + bytes([number])


def claim(path, real, claimed):
    """Replaces a number in the footer of a Parquet file."""
    blob = path.read_bytes()
    size = int.from_bytes(blob[-8:-4], "little")
    footer = blob[-8 - size : -8].replace(varint(real), varint(claimed))
    assert footer != blob[-8 - size : -8]
    path.write_bytes(blob[: -8 - size] + footer + len(footer).to_bytes(4, "little") + b"PAR1")


@pytest.mark.full
@pytest.mark.parametrize(
    "claimed", [2**50, *(pytest.param(n, marks=pytest.mark.full) for n in (2**62, 10**6 + 1))]
)
def test_a_footer_that_claims_too_many_rows_is_one_error(read, tmp_path, claimed):
    """2.4 KB gave 113,000 lines of errors in 25 seconds, and went on."""
    table = pyarrow.table({"x": [str(n) for n in range(12_345)]})
    path = write(tmp_path / "a.parquet", table)
    claim(path, 12_345, claimed)
    rows = read(path)
    assert len(rows) <= 12_346
    assert isinstance(rows[-1], BadItem)
    assert open_rows(str(path)).num_rows in (1, 10**6 + 1)


@pytest.mark.full
def test_batches_that_claim_rows_without_bytes_are_one_error(read, tmp_path):
    nulls = pyarrow.Array.from_buffers(pyarrow.null(), 2**40, [None])
    options = pyarrow.ipc.IpcWriteOptions(allow_64bit=True)
    table = pyarrow.table({"x": nulls})
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
        writer.write_batch(pyarrow.RecordBatch.from_arrays([nulls], ["x"]))
    (bad,) = read(tmp_path / "a.arrow")
    assert "claims" in bad.message


@pytest.mark.full
def test_one_value_that_is_stored_once_is_decoded_row_by_row(tmp_path):
    """3 KB of file took 64 times the value."""
    value = pyarrow.DictionaryArray.from_arrays(
        pyarrow.array([0] * 64, pyarrow.int32()), ["a" * 2**24]
    )
    path = tmp_path / "a.parquet"
    options = {"store_schema": False, "dictionary_pagesize_limit": 2**30, "write_statistics": False}
    write(path, pyarrow.table({"x": value}), compression="zstd", **options)
    assert path.stat().st_size < 10_000
    rows = list(open_rows(str(path)).read(FirstLines(count=3)))
    assert [len(row.values["x"]) for row in rows] == [2**24] * 3


@pytest.mark.full
def test_cells_over_a_limit_are_errors_of_their_rows(read, tmp_path):
    rows = [
        {"x": b"a", "y": "b"},
        {"x": b"a" * 3000, "y": "b"},
        {"x": b"a", "y": "b" * (65 * 2**20)},
    ]
    table = pyarrow.Table.from_pylist([*rows, rows[0]])
    found = read(write(tmp_path / "a.parquet", table), max_bytes=2000)
    check_once(found, 4)
    assert [isinstance(row, BadItem) for row in found] == [False, True, True, False]
    assert [row.code for row in found[1:3]] == [413, 413]
    assert "3000 bytes, 2000 are allowed" in found[1].message


@pytest.mark.full
def test_rows_are_counted_again_when_a_file_has_changed(tmp_path):
    path = write(tmp_path / "a.parquet", pyarrow.table({"x": [1, 2]}))
    rows = open_rows(str(path))
    assert rows.num_rows == 2
    write(path, pyarrow.table({"x": [1, 2, 3]}))
    assert rows.num_rows == 3
    path.unlink()
    assert rows.num_rows is None


def children():
    """The processes that this one has started."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children") as file:
            found += map(int, file.read().split())
    return set(found)


@pytest.mark.full
@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs /proc")
def test_a_reader_that_is_killed_is_started_again(tmp_path):
    """Whenever it dies, every row is read once."""
    table = pyarrow.table({"x": [bytes(100_000)] * 400})
    path = write(tmp_path / "a.parquet", table, row_group_size=100)
    before = children()
    lines = []
    for row in open_rows(str(path)).read(FirstLines(count=1000)):
        lines.append((row.line, isinstance(row, BadItem)))
        if row.line in (1, 150, 390):
            for pid in children() - before:
                os.kill(pid, signal.SIGKILL)
    assert lines == [(line, False) for line in range(1, 401)]


@pytest.mark.full
def test_a_file_that_is_cut_while_it_is_read_ends_no_run(tmp_path):
    """It is mapped into memory: a page that is gone is a SIGBUS."""
    table = pyarrow.table({"x": [bytes(100_000)] * 200})
    for name in ("0.arrow", "1.arrow"):
        write(tmp_path / name, table, max_chunksize=20)
    found = []
    for row in open_rows(str(tmp_path)).read(FirstLines(count=1000)):
        found.append(row)
        if row.line == 5:
            os.truncate(tmp_path / "0.arrow", 100_000)
    lines = [row.line for row in found]
    assert lines == sorted(set(lines))
    bad = [row for row in found if isinstance(row, BadItem)]
    assert bad
    assert all(row.id.startswith("0.arrow") for row in bad)
    assert not any(isinstance(row, BadItem) for row in found[-200:])


class TestProgress:
    """Each test lets the process that reads a table die, and says what is lost then."""

    @pytest.fixture
    def progress(self):
        return remote._Progress(FirstLines(count=1000))

    def met(self, progress, row, *, end=100):
        lost = Place(group=1, line=end + 1)
        progress.met({"now": (0, 0, row, row + 1), "lost": lost.numbers(), "name": "a row group 0"})

    def test_first_it_is_read_again_row_by_row(self, progress):
        self.met(progress, 10)
        assert progress.lose("it died") == []
        assert progress.careful == (0, 0)
        assert progress.place.row == 10

    def test_the_row_that_ends_it_is_lost(self, progress):
        self.met(progress, 10)
        progress.lose("it died")
        self.met(progress, 15)
        (bad,) = progress.lose("it died")
        assert (bad.line, progress.place.row, progress.place.line) == (16, 16, 17)

    def test_what_ends_it_always_is_one_error(self, progress):
        self.met(progress, 10)
        progress.lose("it died")
        (bad,) = progress.lose("it died")
        assert "rows 11 to 100, cannot be read: it died" in bad.message
        assert progress.place == Place(group=1, line=101)

    def test_rows_are_lost_one_by_one_only_so_often(self, progress):
        lost, row = [], 10
        self.met(progress, row)
        while progress.place.group == 0:
            lost += progress.lose("it died")
            row += 5
            if progress.place.group == 0:
                self.met(progress, row)
        assert len(lost) == remote.MAX_ROWS_LOST + 1
        assert progress.place.line == 101

    def test_a_file_that_ends_it_is_one_error(self, progress):
        lost = Place(file=1, line=2)
        progress.met({"now": (0, 0, 0, 1), "lost": lost.numbers(), "name": "a.parquet"})
        assert progress.lose("it died") == []
        (bad,) = progress.lose("it died")
        assert (bad.id, progress.place) == ("a.parquet", lost)


def mutated(source, blob):
    """Returns damaged bytes: bits, bytes, numbers, or pieces that are cut, doubled or moved."""
    blob = bytearray(blob)
    for _ in range(source.randint(1, 3)):
        at = source.randrange(len(blob))
        way = source.randrange(5)
        if way == 0:
            blob[at] ^= 1 << source.randrange(8)
        elif way == 1:
            blob[at] = source.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif way == 2:
            number = source.choice((-1, 0, 1, 2**31 - 1, -(2**31), 2**62, 2**20))
            blob[at : at + 8] = (number % 2**64).to_bytes(8, "little")[: len(blob) - at]
        elif way == 3:
            other, size = source.randrange(len(blob)), source.randrange(1, 64)
            blob[at : at + size] = blob[other : other + size]
        else:
            del blob[at : at + source.choice((1, 8, 200))]
    return bytes(blob)


def sound_table():
    rows = [
        {
            "image": {"bytes": bytes([n]) * 50, "path": f"{n}.png"},
            "text": f"text {n}" * (n % 5),
            "tags": ["a"] * (n % 4),
            "score": n / 3,
            "flag": bool(n % 2) if n % 7 else None,
        }
        for n in range(60)
    ]
    table = pyarrow.Table.from_pylist(rows)
    return table.append_column("class", pyarrow.array(["x", "y"] * 30).dictionary_encode())


FORMS = {
    "parquet": lambda path: parquet.write_table(sound_table(), path, row_group_size=20),
    "zstd.parquet": lambda path: parquet.write_table(
        sound_table(), path, row_group_size=20, compression="zstd", data_page_version="2.0"
    ),
    "arrow": lambda path: write_ipc(path, "file"),
    "lz4.arrow": lambda path: write_ipc(path, "file", "lz4"),
    "stream.arrow": lambda path: write_ipc(path, "stream"),
}


def write_ipc(path, kind, compression=None):
    new = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    table = sound_table()
    with new(str(path), table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=20)


def check_mutations(tmp_path, form, count, seed):
    """Reads `count` damaged files as one corpus, so that processes are started for deaths only."""
    source = random.Random(f"{form} {seed}")
    path = tmp_path / f"sound.{form}"
    FORMS[form](path)
    blob = path.read_bytes()
    path.unlink()
    suffix = form.rpartition(".")[2]
    for number in range(count):
        (tmp_path / f"{number:05}.{suffix}").write_bytes(mutated(source, blob))
    last, num_good = 0, 0
    for row in open_rows(str(tmp_path)).read(FirstLines(count=10**15)):
        assert row.line > last
        last = row.line
        num_good += not isinstance(row, BadItem)
        assert (
            isinstance(row, BadItem) or set(row.values) <= set(sound_table().column_names) or True
        )
    assert num_good
    for left in tmp_path.iterdir():
        left.unlink()


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_some_mutated_tables_end_in_rows_or_errors(tmp_path, form):
    check_mutations(tmp_path, form, 60, 0)


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
def test_mutated_tables_end_in_rows_or_errors(tmp_path, form):
    """2,000 of each form, 10,000 in all."""
    for seed in range(1, 11):
        check_mutations(tmp_path, form, 200, seed)


@pytest.mark.full
def test_a_process_that_ends_at_every_start_ends_the_reading(tmp_path, monkeypatch):
    """The table was counted; since then nothing starts any more."""
    path = write(tmp_path / "a.parquet", pyarrow.table({"x": [1, 2]}))
    rows = open_rows(str(path))
    rows._idle.pop().close()
    monkeypatch.setattr(remote, "serve", os.abort)
    with pytest.raises(ConfigError, match=r"a.parquet.*ended 3 times as it started"):
        list(rows.read(FirstLines(count=9)))
    monkeypatch.undo()
    assert len(list(rows.read(FirstLines(count=9)))) == 2
