"""The child that reads tables, run in a thread of this process: what it sends is what is read, and
coverage sees it."""

import datetime
import json
import threading
from multiprocessing import Pipe

import pytest

from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.data.rows.formats.formats import open_rows
from mmdeploy_llm.data.rows.rows import BadItem, FirstLines
from mmdeploy_llm.data.rows.tables import arrow, ipc, lance_table, parquet, remote, serve
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import PluginManager
from mmdeploy_llm.system.processes import Channel, Worker

pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow: the extra 'parquet'")
pq = pytest.importorskip("pyarrow.parquet")


class ThreadWorker(Worker):
    """A worker that is a thread."""

    connection = None

    def __init__(self, name, entry, *, is_quiet):
        self.name = name
        self.connection, theirs = Pipe()
        self._channel = Channel(self.connection, 0)
        self._theirs = theirs
        self._thread = threading.Thread(target=self._run, args=(entry, Channel(theirs, 0)))
        self._thread.start()

    def _run(self, entry, channel):
        try:
            entry(channel)
        except (EOFError, OSError):
            pass
        finally:
            self._theirs.close()

    def ended_by(self):
        return "it ended"

    def kill(self):
        self.connection.close()
        self._thread.join(60)


@pytest.fixture(autouse=True)
def in_a_thread(monkeypatch):
    """The limits of the child are left out: they would hold for the tests too."""
    monkeypatch.setattr(remote, "Worker", ThreadWorker)
    for name in ("_be_quiet", "_bound", "use_system_memory"):
        monkeypatch.setattr(serve, name, lambda *_: None)


def write_ipc(path, table, *, kind="file", rows=20):
    new = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
    with new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)


def not_utf8(number=40, at=20):
    array = pyarrow.array([b"\xff" if n == at else b"ok" for n in range(number)], pyarrow.binary())
    return pyarrow.Array.from_buffers(pyarrow.string(), number, array.buffers())


def bad_lines(rows):
    return [row.line for row in rows if isinstance(row, BadItem)]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("form", ["parquet", "file", "stream"])
def test_rows_and_faults_of_every_form(read, tmp_path, form):
    column = not_utf8()
    table = pyarrow.table(
        {
            "x": column,
            "s": pyarrow.StructArray.from_arrays([column], ["path"]),
            "l": pyarrow.ListArray.from_arrays(list(range(41)), column),
            "t": pyarrow.array([0] * 40, pyarrow.timestamp("us", tz="Foo/Bar")),
            "d": pyarrow.array([0] * 39 + [2**31 - 1], pyarrow.int32()).view(pyarrow.date32()),
        }
    )
    for number in range(2):
        if form == "parquet":
            pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=20)
        else:
            write_ipc(tmp_path / f"{number}.arrow", table, kind=form)
    rows = read(tmp_path)
    assert [row.line for row in rows] == list(range(1, 81))
    assert bad_lines(rows) == [21, 40, 61, 80]
    assert [row.line for row in read(tmp_path, limit=30)] == list(range(1, 31))
    assert [row.line for row in read(tmp_path, shard=2, num_shards=30)] == [2, 32, 62]


def test_reading_begins_again_within_a_group(tmp_path):
    """A child that cannot go on is asked again from where it was, one row at a time."""
    pq.write_table(pyarrow.table({"x": list(range(90))}), tmp_path / "a.parquet", row_group_size=45)
    write_ipc(tmp_path / "a.arrow", pyarrow.table({"x": list(range(90))}), rows=45)
    write_ipc(tmp_path / "b.arrow", pyarrow.table({"x": list(range(90))}), kind="stream", rows=45)
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        failed = []

        def send(connection, text, buffers, real=serve.send, failed=failed):
            if 60 in json.loads(text).get("lines", []) and not failed:
                failed.append(1)
                raise arrow.NeedsCareError
            real(connection, text, buffers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(serve, "send", send)
            rows = list(open_rows(str(tmp_path / name)).read(FirstLines(count=1000)))
        assert [row.values["x"] for row in rows] == list(range(90)), name
        assert failed, name


def test_memory_that_runs_out_is_an_error_of_what_is_read(read, tmp_path, monkeypatch):
    def no_memory(*_):
        raise MemoryError

    table = pyarrow.table({"x": [1, 2, 3]})
    pq.write_table(table, tmp_path / "a.parquet")
    write_ipc(tmp_path / "a.arrow", table)
    monkeypatch.setattr(parquet, "batch_pieces", no_memory)
    monkeypatch.setattr(ipc, "batch_pieces", no_memory)
    for name in ("a.parquet", "a.arrow"):
        (bad,) = read(tmp_path / name)
        assert "more memory than is sensible" in bad.message


def test_claims_and_groups_that_end_early(read, tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    pq.write_table(pyarrow.table({"x": list(range(40))}), path, row_group_size=20)
    monkeypatch.setattr(parquet, "can_hold", lambda size, rows: rows <= 20)
    rows = read(path)
    assert bad_lines(rows) == [21]
    assert "claims" in rows[-1].message
    monkeypatch.setattr(parquet, "_claims", lambda *_: [30, 20])
    rows = read(path)
    assert bad_lines(rows) == [21]
    assert "ends after 20 of 30" in rows[20].message
    assert [row.line for row in rows[21:]] == list(range(31, 51))


def test_rows_that_are_too_large_together_are_sent_one_by_one(read, tmp_path, monkeypatch):
    from mmdeploy_llm.data.rows.tables import encoding

    monkeypatch.setattr(encoding, "MAX_TEXT", 3000)
    table = pyarrow.table({"x": ["a" * 900] * 5 + ["a" * 9000] + ["a"], "y": [b"b" * 600_000] * 7})
    write_ipc(tmp_path / "a.arrow", table)
    rows = read(tmp_path / "a.arrow")
    assert [row.line for row in rows] == list(range(1, 8))
    assert bad_lines(rows) == [6]
    assert rows[5].code == 413


def test_files_that_are_none(read, tmp_path):
    for name in ("a.arrow", "b.parquet", "c.parquet"):
        (tmp_path / name).write_bytes(b"PAR1 nothing PAR1")
    (bad,) = read(tmp_path / "a.arrow")
    assert bad.id == "a.arrow"
    with pytest.raises(ConfigError, match="not a Parquet file"):
        read(tmp_path / "b.parquet")
    rows = open_rows(f"{tmp_path}/*.parquet")
    assert rows.num_rows == 2
    assert bad_lines(rows.read(Selection())) == [1, 2]


def test_values_that_json_does_not_have(read, tmp_path):
    import datetime
    import decimal

    row = {
        "bytes": b"\x00\xff" * 9,
        "date": datetime.date(2020, 2, 29),
        "when": datetime.datetime(2020, 1, 2, 3, 4, 5, 678),
        "time": datetime.time(1, 2, 3),
        "long": datetime.timedelta(days=-3, microseconds=7),
        "exact": decimal.Decimal("123.4500"),
    }
    write_ipc(tmp_path / "a.arrow", pyarrow.Table.from_pylist([row] * 3))
    assert [found.values for found in read(tmp_path / "a.arrow")] == [row] * 3


def test_what_cannot_be_told_by_row_and_large_cells(read, tmp_path):
    values = pyarrow.DictionaryArray.from_arrays([0, 1, 0], not_utf8(2, 1))
    write_ipc(tmp_path / "a.arrow", pyarrow.table({"x": values}))
    write_ipc(tmp_path / "b.arrow", pyarrow.table({"x": [b"a", b"a" * 2000]}))
    rows = read(tmp_path, max_bytes=1000)
    assert bad_lines(rows) == [1, 5]
    assert "2000 bytes, 1000 are allowed" in rows[-1].message


def test_lance(read, tmp_path, monkeypatch):
    lance = pytest.importorskip("lance", reason="needs pylance: the extra 'lance'")
    lance.write_dataset(pyarrow.table({"x": list(range(70))}), str(tmp_path / "a.lance"))
    assert [row.values["x"] for row in read(tmp_path / "a.lance")] == list(range(70))
    assert len(read(tmp_path / "a.lance", limit=9)) == 9
    real = lance_table.batch_pieces

    def sometimes(batch, cursor):
        if 17 <= cursor.now.line < 33:
            raise RuntimeError("damaged")
        yield from real(batch, cursor)

    monkeypatch.setattr(lance_table, "batch_pieces", sometimes)
    rows = read(tmp_path / "a.lance")
    assert bad_lines(rows) == [17]
    assert rows[16].id == "rows 17 to 32"
    assert [row.line for row in rows] == [*range(1, 18), *range(33, 71)]
    monkeypatch.setattr(lance_table, "MAX_LOST", 1)
    monkeypatch.setattr(lance_table, "batch_pieces", lambda *_: 1 / 0)
    assert bad_lines(read(tmp_path / "a.lance"))[-1] <= 33


OWN_FORMAT = """
import datetime
from mmdeploy_llm.hooks import CorpusFormatSpec, DamagedRow, hookimpl

ROWS = [
    {"a": 1, "b": [1.5, {"c": b"x"}], "d": bytearray(b"y")},
    DamagedRow(message="torn"),
    [1],
    {"a": {1: 2}},
    {"a": object()},
    {"day": datetime.date(2026, 1, 2)},
]

def read(file):
    with file.open() as content:
        yield from ROWS
        if content.read():
            raise ValueError("the rest is damaged")

@hookimpl
def provide_corpus_formats():
    return [CorpusFormatSpec(name="own", reader=f"{__name__}:read", suffixes=(".own",))]
"""


def test_rows_of_a_plugins_format(tmp_path):
    (tmp_path / "own_format.py").write_text(OWN_FORMAT)
    kinds = PluginManager.load(plugins=(), files=[tmp_path / "own_format.py"]).kinds
    (tmp_path / "a.own").write_bytes(b"")
    (tmp_path / "b.own").write_bytes(b"more")
    found = list(open_rows(str(tmp_path / "*.own"), kinds=kinds).read(FirstLines(count=20)))
    shown = [row.message if isinstance(row, BadItem) else dict(row.values) for row in found]
    day = {"day": datetime.date(2026, 1, 2)}
    good, torn, no_mapping, no_text, no_value, last, *rest = shown
    assert (good, last) == ({"a": 1, "b": [1.5, {"c": b"x"}], "d": b"y"}, day)
    assert "torn" in torn
    assert "a row must be a mapping, got list" in no_mapping
    assert "has the name 1, which is no text" in no_text
    assert "has a object, which no row can hold" in no_value
    assert rest[:6] == [*shown[:5], day]
    assert "the rest is damaged" in rest[6]
