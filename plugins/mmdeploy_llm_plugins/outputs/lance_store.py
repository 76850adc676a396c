"""LanceStore: an output of vectors that is a Lance dataset. Needs the extra `lance` (pylance).

    position int64 | id | path | error_code | record, as JSON | embedding, null where an item failed

Records are collected in a journal beside the dataset, NAME.lance.journal, a line for each with its
position before it; a full one is added to the dataset, and lines whose positions the dataset has
are void. The column of vectors is that of Parquet outputs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import IO, Any

from mmdeploy_llm.data.outputs.public import (
    EMBEDDING,
    Vector,
    VectorKind,
    arrays_of,
    column_of,
    field_of,
    kind_in,
)
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import RecordStore

MAX_LINES, MAX_BYTES = 20_000, 64 * 2**20  # of the journal
MAX_JOURNAL = 8 * MAX_BYTES  # that is read: its last record may be long
ROWS_AT_ONCE = 1024
COLUMNS = ("position", "record", EMBEDDING)


class LanceStore(RecordStore):
    """See RecordStore. Raises ConfigError where pylance is missing or there is something else."""

    def __init__(self, path: Path, writable: bool) -> None:
        self._path, self._writable = path, writable
        self._lance, self._arrow = _libraries()
        self._journal_path = path.with_name(f"{path.name}.journal")
        if writable:
            path.mkdir(parents=True, exist_ok=True)
        self._dataset = self._opened()
        self._places = self._positions()
        self._next = max(self._places, default=-1) + 1  # the position of the next record
        self._spots: dict[int, tuple[int, int]] = {}  # of lines of the journal: begin and size
        self._size = 0
        self._file: FileIO | None = None
        self._reader: IO[bytes] | None = None  # of the journal that this store knows
        try:
            self._read_journal()
            if writable:
                self._begin()
        except BaseException:
            self._close_journal()
            raise

    def entries(self) -> Iterator[tuple[int, str]]:
        """Yields the records of the dataset, then those of the journal."""
        if self._dataset is not None:
            names = [name for name in COLUMNS if name in self._dataset.schema.names]
            for batch in self._dataset.to_batches(columns=names, batch_size=ROWS_AT_ONCE):
                yield from _records(batch)
        for position in self._spots:
            yield position, self._line(position)

    def get(self, position: int) -> str:
        """Returns one record."""
        if position in self._spots:
            return self._line(position)
        at = self._places.get(position)
        if at is None or self._dataset is None:
            raise LookupError(position)
        names = [name for name in COLUMNS if name in self._dataset.schema.names]
        table = self._dataset.take([at], columns=names)
        return next(_records(table))[1]

    def append(self, line: str, values: Mapping[str, Any]) -> int:
        """Adds a line to the journal."""
        assert self._file is not None, "the store is written to"
        position = self._next
        data = f"{position}\t{line}\n".encode()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(self._size)  # else the next line would continue a torn one
            raise
        self._spots[position] = self._size, len(data)
        self._next = position + 1
        self._size += len(data)
        if len(self._spots) >= MAX_LINES or self._size >= MAX_BYTES:
            self._flush()
        return position

    def delete(self, positions: Collection[int]) -> None:
        """Removes records, in one version of the dataset."""
        self._flush()
        assert self._dataset is not None, "what is deleted was written"
        named = ", ".join(map(str, sorted(positions)))
        self._dataset.delete(f"position in ({named})")
        self._renew()

    def finish(self) -> None:
        """Adds what is left to the dataset."""
        self._flush()

    def close(self) -> None:
        """Closes the journal, and removes an empty one."""
        self._close_journal()
        if self._writable and not self._spots:
            self._journal_path.unlink(missing_ok=True)

    def _close_journal(self) -> None:
        for file in (self._file, self._reader):
            if file is not None:
                file.close()
        self._file = self._reader = None

    def _line(self, position: int) -> str:
        """Returns a line of the journal."""
        assert self._reader is not None, "lines are known"
        begin, size = self._spots[position]
        self._reader.seek(begin)
        return self._reader.read(size).partition(b"\t")[2].decode().removesuffix("\n")

    def _opened(self) -> Any:
        """Returns the dataset, None where there is none yet."""
        if not (self._path / "_versions").is_dir():
            others = [name for name in os.listdir(self._path)] if self._path.is_dir() else []
            if others or self._path.is_file():
                raise ConfigError(f"{str(self._path)!r} is no Lance dataset; name another --output")
            return None
        dataset = self._lance.dataset(str(self._path))
        if not {"position", "record"} <= set(dataset.schema.names):
            raise ConfigError(
                f"{str(self._path)!r} is a Lance dataset that `embed` has not written; name "
                "another --output"
            )
        return dataset

    def _positions(self) -> dict[int, int]:
        """Returns the row of each position."""
        if self._dataset is None:
            return {}
        column = self._dataset.to_table(columns=["position"]).column(0).to_pylist()
        return {position: row for row, position in enumerate(column)}

    def _renew(self) -> None:
        self._dataset = self._opened()
        self._places = self._positions()

    def _read_journal(self) -> None:
        """Reads the lines that are not in the dataset; a torn last one is none. Raises ConfigError
        for a file that is no journal."""
        path = self._journal_path
        if not path.exists():
            return
        if not path.is_file() or path.stat().st_size > MAX_JOURNAL:
            raise self._no_journal("no file, or one of more than 512 MiB")
        self._reader = path.open("rb")
        first, end = self._next, 0
        for index, line in enumerate(self._reader, 1):
            if not line.endswith(b"\n"):
                break
            number, _, text = line[:-1].partition(b"\t")
            try:
                position, record = int(number), text.decode()
                is_void = 0 <= position < first  # the dataset has it
                is_record = is_void or (position >= 0 and isinstance(json.loads(record), dict))
            except ValueError:
                is_record = False
            if not is_record:
                raise self._no_journal(f"line {index} is no position with a record")
            if not is_void:
                self._spots[position] = end, len(line)
            end += len(line)
        self._next = max(self._spots, default=first - 1) + 1

    def _no_journal(self, found: str) -> ConfigError:
        return ConfigError(
            f"{str(self._journal_path)!r} is not the journal of this output: {found}; it holds the "
            "last records of a run: remove it to have these made again, or name another --output"
        )

    def _begin(self) -> None:
        """Begins a new journal, without lines that are void or torn. Who reads the old one keeps
        it."""
        partial = self._journal_path.with_name(f"{self._journal_path.name}.partial")
        partial.unlink(missing_ok=True)
        spots, size = {}, 0
        with partial.open("xb") as file:  # never through a link
            for position in self._spots:
                data = f"{position}\t{self._line(position)}\n".encode()
                file.write(data)
                spots[position] = size, len(data)
                size += len(data)
        self._close_journal()
        os.replace(partial, self._journal_path)
        self._spots, self._size = spots, size
        self._file = self._journal_path.open("ab", buffering=0)
        self._reader = self._journal_path.open("rb")

    def _flush(self) -> None:
        """Adds the journal to the dataset; writes it whole where its vectors are of a new kind."""
        if not self._spots:
            return
        rows = [(position, self._line(position)) for position in self._spots]
        kind = _kind_of(rows)
        known = self._kind()
        if self._dataset is not None and kind is not None and kind.widened(known) != known:
            rows = [*self.entries()]
            self._write(rows, kind.widened(known), "overwrite")
        else:
            kind = known if self._dataset is not None else kind
            self._write(rows, kind, "create" if self._dataset is None else "append")
        self._spots.clear()
        self._renew()
        self._begin()

    def _kind(self) -> VectorKind | None:
        schema = None if self._dataset is None else self._dataset.schema
        if schema is None or EMBEDDING not in schema.names:
            return None
        return kind_in(schema.field(EMBEDDING).type)

    def _write(self, rows: list[tuple[int, str]], kind: VectorKind | None, mode: str) -> None:
        arrow = self._arrow
        values = [json.loads(line) for _, line in rows]
        vectors = [Vector.from_json(own.pop(EMBEDDING, None)) for own in values]
        codes = [own["error"] and own["error"]["code"] for own in values]
        columns = {
            "position": arrow.array([position for position, _ in rows], arrow.int64()),
            "id": arrow.array([_text(own.get("id")) for own in values], arrow.string()),
            "path": arrow.array([own.get("path") for own in values], arrow.string()),
            "error_code": arrow.array(codes, arrow.int64()),
            "record": arrow.array(
                [json.dumps(own, ensure_ascii=False) for own in values], arrow.string()
            ),
        }
        table = arrow.table(columns)
        if kind is not None:
            arrays = [None if own is None else own.array() for own in vectors]
            table = table.append_column(field_of(arrow, kind), column_of(arrow, arrays, kind))
        self._lance.write_dataset(table, str(self._path), mode=mode)


def _records(batch: Any) -> Iterator[tuple[int, str]]:
    """Yields positions and lines of the rows of a batch."""
    positions, texts = batch.column("position"), batch.column("record")
    has_vectors = EMBEDDING in batch.schema.names
    vectors = arrays_of(batch.column(EMBEDDING)) if has_vectors else [None] * len(texts)
    for at, own in enumerate(vectors):
        position, text = positions[at].as_py(), texts[at].as_py()
        if own is None:
            yield position, text
            continue
        vector = Vector.of(own)
        value = json.dumps({"shape": vector.shape, "float32": vector.float32})
        yield position, f'{text[:-1]}, "{EMBEDDING}": {value}}}'


def _kind_of(rows: list[tuple[int, str]]) -> VectorKind | None:
    kind = None
    for _, line in rows:
        vector = Vector.from_json(json.loads(line).get(EMBEDDING))
        kind = kind if vector is None else VectorKind.of(vector.shape).widened(kind)
    return kind


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _libraries() -> tuple[Any, Any]:
    try:
        import lance
        import pyarrow
    except ImportError:
        raise ConfigError(
            'an output in Lance needs pylance: pip install "mmdeploy-llm[lance]", or write '
            "NAME.parquet"
        ) from None
    return lance, pyarrow
