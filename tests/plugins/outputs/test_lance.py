"""Outputs of vectors that are Lance datasets, and their journal."""

from contextlib import closing
from pathlib import Path

import pytest
from mmdeploy_llm_plugins.outputs.lance_store import LanceStore

from mmdeploy_llm.data.outputs.opening.choose import open_sink
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.errors import ConfigError
from tests.data.outputs.vectors import failed, made, written

STORE = "mmdeploy_llm_plugins.outputs.lance_store"


@pytest.fixture
def small_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lance")
    monkeypatch.setattr(f"{STORE}.MAX_LINES", 2)


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
    monkeypatch.setattr(f"{STORE}.MAX_JOURNAL", 4)
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
    with closing(LanceStore(tmp_path / "v.lance", writable=False)) as found:
        assert [line for _, line in found.entries()] == [lines[0], lines[2]]
