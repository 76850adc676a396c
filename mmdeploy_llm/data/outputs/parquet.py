"""Parquet parts: a row for each record, in a schema that is the same in all parts.

Records are collected in a journal of lines; a full journal becomes a part whose row groups hold at
most GROUP_ITEMS rows and about GROUP_BYTES of text. Answers, carried columns and other fields have
columns of their own, with kinds that widen as values come (data/records/columns.py); at the end of
a run parts with narrower columns are written again. `tool_calls` and `outputs`, whose fields differ
from model to model, are JSON texts; `more` has what no column gives back, such as the id 7, a
number. Vectors have a column of their own, see arrow_vectors.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import IO, Any

from mmdeploy_llm.data.records.arrow_vectors import (
    EMBEDDING,
    VectorKind,
    arrays_of,
    column_of,
    field_of,
    vectors_in,
)
from mmdeploy_llm.data.records.columns import Columns, Kind, Origin, fitted, restored
from mmdeploy_llm.data.records.declared import JSON
from mmdeploy_llm.data.records.item import Vector
from mmdeploy_llm.data.records.record import EXACT, FIELDS, Record
from mmdeploy_llm.errors import ConfigError

from .formats import (
    CompletePart,
    Drops,
    PartReader,
    damaged,
    first_positions,
)
from .lines import LineParts, LineReader
from .scan import Entry, whole_lines

GROUP_ITEMS, GROUP_BYTES = 5_000, 16 * 2**20
ROWS_AT_ONCE = 256
CONFIGURATIONS = b"mmdeploy_llm.configurations"
ORIGIN = b"mmdeploy_llm"  # in the metadata of a column: source, name and kind, see Columns
FIXED = {name: own.kind for name, own in FIELDS.items() if own.kept != "if any"}  # in every part
MORE = "more"
ALWAYS = (*FIXED, MORE)
MAX_SHOWN = 200  # characters of a library's message


class ParquetParts(LineParts):
    """Parts that are Parquet files; see PartFormat. Raises ConfigError when pyarrow is missing."""

    def __init__(self, most_items: int | None) -> None:
        super().__init__(most_items)
        self._arrow, self._parquet = libraries()
        self._columns = new_columns()
        self._vectors: VectorKind | None = None  # of the records that are known
        self._sealed: dict[str, tuple[Any, ...]] = {}  # facts of the parts of this run

    @property
    def schema(self) -> Any:
        """The columns of every part, as far as they are known."""
        arrow = self._arrow
        known = [arrow.field(name, _arrow_type(arrow, kind)) for name, kind in FIXED.items()]
        own = [
            arrow.field(name, _arrow_type(arrow, kind), metadata=_as_metadata(origin, kind))
            for name, origin, kind in self._columns.items()
        ]
        if self._vectors is not None:
            own.append(field_of(arrow, self._vectors))
        return arrow.schema([*known, *own, arrow.field(MORE, arrow.string())])

    def reader(self, file: IO[bytes], name: str, *, is_open: bool) -> PartReader:
        """Opens a part or the journal."""
        if is_open:
            return LineReader(file, name)
        return ParquetReader(self._opened(file, name), file, name)

    def seal(
        self,
        file: IO[bytes],
        name: str,
        new: Callable[[], IO[bytes]],
        configurations: str | None,
    ) -> bool:
        """Writes the journal as a part."""
        for line in whole_lines(file):
            values = json.loads(line)
            self._columns.add(values)
            self._widen_vectors(Vector.from_json(values.get(EMBEDDING)))
        file.seek(0)
        with new() as out, self._writer(out, configurations) as writer:
            for rows in _groups(file, self._columns):
                writer.write_table(self._table(rows), row_group_size=len(rows))
        self._sealed[name] = self._facts()
        return True

    def copy_without(self, file: IO[bytes], drops: Drops, out: IO[bytes], *, is_open: bool) -> bool:
        """Copies the other rows, group by group."""
        if is_open:
            return super().copy_without(file, drops, out, is_open=True)
        part = self._opened(file, "a part")
        is_same = self._widened_by(part) == self._facts()
        known = (part.schema_arrow.metadata or {}).get(CONFIGURATIONS)
        dropped, first, is_any = first_positions(drops), 0, False
        with self._writer(out, None if known is None else known.decode()) as writer:
            for group in range(part.num_row_groups):
                table = part.read_row_group(group)
                mask = [first + row not in dropped for row in range(table.num_rows)]
                first += table.num_rows
                if any(mask):
                    kept = table.filter(self._arrow.array(mask))
                    writer.write_table(kept if is_same else self._as_now(kept))
                    is_any = True
        return is_any

    def outdated(self, parts: Iterable[CompletePart]) -> list[int]:
        """Returns the numbers of the parts whose columns are not those that are known by now, after
        a look at all that this run has not written; `copy_without` writes such a part with
        these."""
        found = []
        for part in parts:
            own = self._sealed.get(part.open_name)
            if own is None:
                with part.open() as file:
                    own = self._widened_by(self._opened(file, part.open_name))
            found.append((part.number, own))
        now = self._facts()
        return [number for number, own in found if own != now]

    def _widened_by(self, part: Any) -> tuple[Any, ...]:
        """Widens the columns by those of a part; returns the facts of its schema."""
        own = columns_of(part.schema_arrow)
        for name, origin, kind in own.items():
            self._columns.widen(origin, kind, name)
        vectors = vectors_in(part.schema_arrow)
        self._vectors = self._vectors if vectors is None else vectors.widened(self._vectors)
        return tuple(part.schema_arrow.names), vectors, *own.items()

    def _facts(self) -> tuple[Any, ...]:
        return tuple(self.schema.names), self._vectors, *self._columns.items()

    def _as_now(self, table: Any) -> Any:
        """Returns rows of an earlier schema in the one that is known."""
        own = columns_of(table.schema)
        rows = [row_of(values, self._columns) for values in values_in(table, own)]
        return self._table(rows)

    def _widen_vectors(self, vector: Vector | None) -> None:
        if vector is not None:
            self._vectors = VectorKind.of(vector.shape).widened(self._vectors)

    def _table(self, rows: list[dict[str, Any]]) -> Any:
        """Returns a table of rows, in the schema that is known."""
        schema = self.schema
        vectors = [row.pop(EMBEDDING, None) for row in rows]
        at = schema.get_field_index(EMBEDDING)
        if at < 0:
            return self._arrow.Table.from_pylist(rows, schema=schema)
        assert self._vectors is not None
        table = self._arrow.Table.from_pylist(rows, schema=schema.remove(at))
        arrays = [None if own is None else own.array() for own in vectors]
        column = column_of(self._arrow, arrays, self._vectors)
        return table.add_column(at, schema.field(at), column)

    def _writer(self, file: Any, configurations: str | None) -> Any:
        known = {} if configurations is None else {CONFIGURATIONS: configurations.encode()}
        schema = self.schema.with_metadata(known)
        return self._parquet.ParquetWriter(file, schema, compression="zstd")

    def _opened(self, file: IO[bytes], name: str) -> Any:
        # OSError and ValueError: what pyarrow raises for damaged data.
        try:
            part = self._parquet.ParquetFile(file)
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise _unreadable(name, error) from None
        missing = [name for name in ALWAYS if name not in part.schema_arrow.names]
        if missing:
            raise _unreadable(name, f"it has no column {missing[0]!r}")
        return part


class ParquetReader:
    """One Parquet part; the position of a record is the number of its row."""

    def __init__(self, part: Any, file: IO[bytes], name: str) -> None:
        self._part, self._file, self._name = part, file, name
        self._columns = columns_of(part.schema_arrow)
        self._group = -1  # whose rows are held
        self._rows: list[dict[str, Any]] = []
        counts = [part.metadata.row_group(group).num_rows for group in range(part.num_row_groups)]
        self._firsts = [sum(counts[:group]) for group in range(len(counts))]

    def entries(self) -> Iterator[Entry]:
        """Yields the records of all rows."""
        number = 0
        batches = self._part.iter_batches(batch_size=ROWS_AT_ONCE)
        while (rows := self._next(batches)) is not None:
            for values in rows:
                yield Entry(begin=number, end=number + 1, record=self._record(values, number))
                number += 1

    def at(self, position: int) -> Record:
        """Returns the record of a row; holds the rows of one group."""
        group = max(i for i, first in enumerate(self._firsts) if first <= position)
        if group != self._group:
            self._rows = self._values(self._part.read_row_group(group))
            self._group = group
        return self._record(self._rows[position - self._firsts[group]], position)

    def media(self, position: int) -> AbstractContextManager[None]:
        """Returns None: rows hold no media."""
        return nullcontext()

    def configurations(self) -> str | None:
        """Returns those in the metadata of the schema."""
        known = (self._part.schema_arrow.metadata or {}).get(CONFIGURATIONS)
        return None if known is None else str(known.decode())

    def close(self) -> None:
        """Closes the file."""
        self._part.close()
        self._file.close()

    def _next(self, batches: Iterator[Any]) -> list[dict[str, Any]] | None:
        try:
            batch = next(batches, None)
        except (OSError, ValueError) as error:  # ArrowInvalid is a ValueError
            raise _unreadable(self._name, error) from None
        return None if batch is None else self._values(batch)

    def _values(self, batch: Any) -> list[dict[str, Any]]:
        try:
            return values_in(batch, self._columns)
        except (ConfigError, KeyError, TypeError, ValueError, RecursionError) as error:
            reason = f"its rows are not records of a batch ({error})"
            raise _unreadable(self._name, reason) from None

    def _record(self, values: dict[str, Any], number: int) -> Record:
        try:
            return Record.from_values(values)
        except (ValueError, RecursionError) as error:
            reason = f"row {number + 1} is not a record of a batch ({error})"
            raise _unreadable(self._name, reason) from None


def new_columns() -> Columns:
    """Returns the columns of a table that has no record yet."""
    return Columns(fixed=(*ALWAYS, EMBEDDING), fields=(*FIXED, EXACT, EMBEDDING))


def columns_of(schema: Any) -> Columns:
    """Returns the columns of a part besides the fixed ones, by the metadata of its schema."""
    columns = new_columns()
    for own in schema:
        known = (own.metadata or {}).get(ORIGIN)
        if known is not None:
            values = json.loads(known)
            origin = Origin(source=values["source"], name=values["name"])
            columns.widen(origin, Kind.from_json(values["kind"]), own.name)
    return columns


def values_in(table: Any, columns: Columns) -> list[dict[str, Any]]:
    """Returns the JSON objects of the records of a table or batch. Raises ValueError."""
    vectors: list[Any] = []
    if vectors_in(table.schema) is not None:
        vectors = arrays_of(table.column(EMBEDDING))
        table = table.select([name for name in table.schema.names if name != EMBEDDING])
    found = [values_of(row, columns) for row in table.to_pylist()]
    for values, own in zip(found, vectors, strict=bool(vectors)):
        if own is not None:
            vector = Vector.of(own)
            values[EMBEDDING] = {"shape": vector.shape, "float32": vector.float32}
    return found


def row_of(values: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Returns the row of a record's JSON object."""
    own = values["id"]
    plain = {**values, "id": None if own is None else str(own)}
    row = {name: fitted(plain.get(name), kind) for name, kind in FIXED.items()}
    row.update(columns.cells(values))
    row[EMBEDDING] = Vector.from_json(values.get(EMBEDDING))
    more = columns.rest(values)
    if EXACT in values:
        more[EXACT] = values[EXACT]
    if isinstance(own, int):
        more["id"] = own
    row[MORE] = _json(more) if more else None
    return row


def values_of(row: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Returns the JSON object of a record; the inverse of `row_of`. Raises ValueError."""
    values: dict[str, Any] = {}
    for name, kind in FIXED.items():
        value = row[name]
        if value is not None:
            values[name] = json.loads(value) if kind == JSON else value
        elif FIELDS[name].kept == "always":
            values[name] = None  # a line of JSON leaves the others out
    more = json.loads(row[MORE]) if row[MORE] is not None else {}
    return {**values, **restored(row, columns, more)}


def _groups(journal: IO[bytes], columns: Columns) -> Iterator[list[dict[str, Any]]]:
    """Yields the rows of the journal, those of a row group at once."""
    rows: list[dict[str, Any]] = []
    size = 0
    for line in whole_lines(journal):
        rows.append(row_of(json.loads(line), columns))
        size += len(line)
        if len(rows) == GROUP_ITEMS or size >= GROUP_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def _arrow_type(arrow: ModuleType, kind: Kind) -> Any:
    """Returns the type of a column. One that has no value yet is of texts: readers take the schema
    of a folder from its first file, and no value fits a column of type null."""
    if kind.name == "list":
        assert kind.item is not None
        return arrow.list_(_arrow_type(arrow, kind.item))
    if kind.name == "struct":
        return arrow.struct([(name, _arrow_type(arrow, own)) for name, own in kind.fields.items()])
    types = {"bool": arrow.bool_, "int": arrow.int64, "float": arrow.float64}
    return types.get(kind.name, arrow.string)()


def _as_metadata(origin: Origin, kind: Kind) -> dict[bytes, bytes]:
    own = {"source": origin.source, "name": origin.name, "kind": kind.to_json()}
    return {ORIGIN: _json(own).encode()}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _unreadable(name: str, error: object) -> ConfigError:
    return damaged(name, str(error)[:MAX_SHOWN])


def libraries() -> tuple[ModuleType, ModuleType]:
    """Returns pyarrow, and its module for Parquet. Raises ConfigError where they are missing."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(
            "an output in Parquet needs pyarrow: pip install "
            '"mmdeploy-llm[parquet]", or write JSON lines: --output NAME.jsonl'
        ) from None
    return pyarrow, parquet
