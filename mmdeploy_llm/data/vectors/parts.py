"""Parts: files with vectors, each read in blocks that are numbered from 0.

A part is one of an output of `embed`, or any other Parquet file with a column of vectors, or .npy
file of an array.
"""

from __future__ import annotations

import itertools
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from mmdeploy_llm.data.outputs.base import Readable
from mmdeploy_llm.data.outputs.formats import ArrayReader, PartFormat
from mmdeploy_llm.data.outputs.parquet import ALWAYS, ParquetReader, libraries
from mmdeploy_llm.data.outputs.scan import Entry
from mmdeploy_llm.data.records.arrow_vectors import EMBEDDING, kind_in, matrix_of, vectors_in
from mmdeploy_llm.data.records.npy_head import read_npy_head
from mmdeploy_llm.data.records.record import Record, key_of
from mmdeploy_llm.errors import ConfigError

from .block import BLOCK_BYTES, Block

if TYPE_CHECKING:
    from .block import Numbers

Opened = Callable[[], AbstractContextManager[IO[bytes]]]
MAX_SHOWN = 200  # characters of a library's message
ROWS_AT_ONCE = 2048  # of a table
PATHS = ("path", "file_name", "image_path", "image", "url")  # columns that name a file
NUMBERS = ("float16", "float32", "float64")


class Part(Protocol):
    """One file. num_items: its items, those without a vector too. has_ids: whether its items have
    ids; else they are told apart by their numbers among all."""

    num_items: int

    @property
    def has_ids(self) -> bool: ...

    def keys(self) -> Iterator[str]:
        """Yields what tells the items apart, where they have ids."""

    def blocks(self) -> Iterator[Block]:
        """Yields the items that have vectors."""

    def records(self, numbers: Sequence[int]) -> list[Record]:
        """Returns the records of some items, without their vectors."""


class ParquetPart:
    """A Parquet file. name: for messages. column: of the vectors; None: that of an output, else the
    only one with lists of numbers. is_output: whether it may be a part in which all items have
    failed. is_ours: whether it is a part of an output with vectors."""

    def __init__(
        self, opened: Opened, name: str, column: str | None = None, *, is_output: bool = False
    ) -> None:
        self._opened, self._name = opened, name
        self._arrow, self._parquet = libraries()
        with self._file() as file:
            schema = file.schema_arrow
            self.num_items = int(file.metadata.num_rows)
            self._names = list(schema.names)
            has_vectors = vectors_in(schema) is not None and column in (None, EMBEDDING)
            is_empty = is_output and not has_vectors and set(ALWAYS) <= set(self._names)
            self.is_ours = has_vectors or is_empty
            self._column = None if is_empty else EMBEDDING
            if not self.is_ours:
                self._column = self._chosen(schema, column)

    @property
    def has_ids(self) -> bool:
        """Whether there is a column of ids."""
        return "id" in self._names

    def keys(self) -> Iterator[str]:
        """Yields the ids."""
        names = [name for name in ("id", "line") if name in self._names]
        for batch in self._batches(names):
            ids = batch.column("id").to_pylist()
            lines = batch.column("line").to_pylist() if "line" in names else itertools.repeat(None)
            yield from (
                key_of(own if own is None else str(own), line)
                for own, line in zip(ids, lines, strict=False)
            )

    def blocks(self) -> Iterator[Block]:
        """Yields the rows that have vectors."""
        first = 0
        for batch in self._batches([self._column]) if self._column else ():
            try:
                found = matrix_of(batch.column(0))
            except ConfigError as error:
                raise ConfigError(
                    f"{self._name!r}: rows {first + 1} to {first + len(batch)}: {error}; one file "
                    "has vectors of one size"
                ) from None
            numbers = first + np.flatnonzero(found.is_valid)
            lengths = found.lengths
            if lengths is not None:
                numbers, lengths = numbers[lengths > 0], lengths[lengths > 0]
            first += len(batch)
            if len(numbers):
                yield from Block(numbers=numbers, rows=found.values, lengths=lengths).pieces()

    def records(self, numbers: Sequence[int]) -> list[Record]:
        """Returns the records of an output; of another table the id and path of rows."""
        if self.is_ours:
            with self._opened() as raw, self._reading():
                reader = ParquetReader(self._parquet.ParquetFile(raw), raw, self._name)
                return [reader.at(number) for number in numbers]
        names = [name for name in ("id", *PATHS) if name in self._names]
        first, found = 0, {}
        wanted = sorted(set(numbers))
        for batch in self._batches(names or self._names[:1]):
            inside = [own for own in wanted if first <= own < first + len(batch)]
            for own in inside:
                row = {name: batch.column(name)[own - first].as_py() for name in names}
                found[own] = plain_record(own, row)
            first += len(batch)
        return [found[number] for number in numbers]

    def _batches(self, columns: list[str]) -> Iterator[Any]:
        with self._file() as file:
            yield from file.iter_batches(batch_size=ROWS_AT_ONCE, columns=columns)

    @contextmanager
    def _file(self) -> Iterator[Any]:
        with self._opened() as raw, self._reading():
            yield self._parquet.ParquetFile(raw, pre_buffer=False, buffer_size=2**20)

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except (self._arrow.ArrowException, OSError, ValueError) as error:
            raise ConfigError(
                f"{self._name!r} cannot be read as Parquet: {str(error)[:MAX_SHOWN]}; copy it "
                "again, or have it written again"
            ) from None

    def _chosen(self, schema: Any, column: str | None) -> str:
        found = [own.name for own in schema if kind_in(own.type) is not None]
        if column in found:
            return str(column)
        known = ", ".join(found) if found else "none"
        if column is not None:
            raise ConfigError(
                f"{self._name!r} has no column {column!r} with lists of numbers; it has: {known}"
            )
        if len(found) != 1:
            hint = "name one with --column" if found else f"its columns: {', '.join(schema.names)}"
            raise ConfigError(
                f"{self._name!r} needs a column with vectors, lists of float16, float32 or "
                f"float64; it has {known}; {hint}"
            )
        return str(found[0])


class ArrayPart:
    """A .npy file that is not of ours: [items, size], or [items, tokens, size]. Ids are the lines
    of NAME.ids.txt beside it, if there is one, else numbers of rows from 1."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with path.open("rb") as file:
            self._head = head = read_npy_head(file, str(path))
        if len(head.shape) not in (2, 3) or head.dtype.name not in NUMBERS:
            raise ConfigError(
                f"{str(path)!r} has an array of {head.dtype.name} {list(head.shape)}; vectors are "
                f"[items, size] or [items, tokens, size] of {', '.join(NUMBERS)}"
            )
        self.num_items = head.shape[0]
        self._ids = self._listed(path.with_name(f"{path.stem}.ids.txt"))

    @property
    def has_ids(self) -> bool:
        """Whether there is a file of ids."""
        return self._ids is not None

    def keys(self) -> Iterator[str]:
        """Yields the ids."""
        yield from self._ids or ()

    def blocks(self) -> Iterator[Block]:
        """Yields the rows, mapped into memory and converted block by block."""
        shape = self._head.shape
        if 0 in shape:
            return
        mapped = np.memmap(self._path, self._head.dtype, "r", self._head.begin, shape)
        step = max(1, BLOCK_BYTES // (mapped[0].size * 4))
        for begin in range(0, len(mapped), step):
            rows = np.asarray(mapped[begin : begin + step]).astype("f4")
            numbers = np.arange(begin, begin + len(rows))
            if rows.ndim == 2:
                yield Block(numbers=numbers, rows=rows)
                continue
            lengths = np.full(len(rows), shape[1])
            yield Block(numbers=numbers, rows=rows.reshape(-1, shape[2]), lengths=lengths)

    def records(self, numbers: Sequence[int]) -> list[Record]:
        """Returns the ids."""
        ids = self._ids
        return [
            plain_record(number, {} if ids is None else {"id": ids[number]}) for number in numbers
        ]

    def _listed(self, path: Path) -> list[str] | None:
        if not path.exists():
            return None
        check_file(path)
        data = path.read_bytes()
        lines = data.removesuffix(b"\n").split(b"\n") if data else []
        try:
            ids = [line.removesuffix(b"\r").decode() for line in lines]
        except UnicodeDecodeError as error:
            raise ConfigError(f"{str(path)!r} must be text in UTF-8: {error}") from None
        if len(ids) != self.num_items:
            raise ConfigError(
                f"{str(path)!r} has {len(ids)} ids, and {str(self._path)!r} has {self.num_items} "
                "rows: there must be as many, one on each line"
            )
        return ids


class OutputArrayPart:
    """A part of an output whose vectors are one array. form: its format, which has_arrays."""

    def __init__(self, opened: Opened, name: str, form: PartFormat) -> None:
        self._opened, self._name, self._form = opened, name, form
        with self._reader() as reader:
            own = reader.places()
        self.num_items = len(own)
        self._rows = np.array([place.row for place in own], "i8")
        self._lengths = np.array([place.num_rows for place in own], "i8")
        self._is_many = any(place.is_many for place in own)

    @property
    def has_ids(self) -> bool:
        """True: records have ids."""
        return True

    def keys(self) -> Iterator[str]:
        """Yields the keys of the records."""
        with self._reader() as reader:
            yield from reader.keys()

    def blocks(self) -> Iterator[Block]:
        """Yields the vectors."""
        numbers = np.flatnonzero(self._lengths)
        with self._reader() as reader:
            whole = reader.array
        lengths = self._lengths[numbers]
        if len(numbers):
            block = Block(
                numbers=numbers,
                rows=whole[_all_rows(self._rows[numbers], lengths)],
                lengths=lengths if self._is_many else None,
            )
            yield from block.pieces()

    def records(self, numbers: Sequence[int]) -> list[Record]:
        """Returns records."""
        with self._reader() as reader:
            return [reader.at(number) for number in numbers]

    @contextmanager
    def _reader(self) -> Iterator[ArrayReader]:
        with self._opened() as file:
            yield array_reader(self._form, file, self._name)


def array_reader(form: PartFormat, file: IO[bytes], name: str) -> ArrayReader:
    """Opens a complete part of a format that has_arrays."""
    return cast(ArrayReader, form.reader(file, name, is_open=False))


class RecordsPart:
    """Records of any output, read one by one. entries: reads some of them instead of all."""

    def __init__(
        self, output: Readable, entries: Callable[[], Iterator[Entry]] | None = None
    ) -> None:
        self._output, self._entries = output, entries or output.entries
        self._positions = array("Q", (entry.begin for entry in self._entries()))
        self.num_items = len(self._positions)

    @property
    def has_ids(self) -> bool:
        """True: records have ids."""
        return True

    def keys(self) -> Iterator[str]:
        """Yields the keys."""
        for entry in self._entries():
            yield entry.record.key

    def blocks(self) -> Iterator[Block]:
        """Yields the vectors of the records that have one."""
        held: list[tuple[int, Any]] = []
        size = 0
        for number, entry in enumerate(self._entries()):
            own = entry.record.embedding
            if own is None:
                continue
            try:
                held.append((number, own.array()))
            except ValueError as error:
                raise ConfigError(f"the vector of {entry.record.id!r}: {error}") from None
            size += held[-1][1].nbytes
            if size >= BLOCK_BYTES:
                yield _block(held)
                held, size = [], 0
        if held:
            yield _block(held)

    def records(self, numbers: Sequence[int]) -> list[Record]:
        """Returns records."""
        order = sorted(set(numbers))
        positions = [self._positions[own] for own in order]
        found = dict(zip(order, self._output.records_at(positions), strict=True))
        return [found[number] for number in numbers]


def _block(held: Sequence[tuple[int, Any]]) -> Block:
    """Returns a block of vectors. Raises ConfigError where they differ in size."""
    arrays = [np.atleast_2d(own) for _, own in held]
    sizes = sorted({own.shape[1] for own in arrays})
    if len(sizes) > 1:
        raise ConfigError(f"vectors have {sizes[0]} numbers and {sizes[1]} numbers")
    is_many = any(own.ndim == 2 for _, own in held)
    return Block(
        numbers=np.array([number for number, _ in held]),
        rows=np.concatenate(arrays),
        lengths=np.array([len(own) for own in arrays]) if is_many else None,
    )


def _all_rows(firsts: Numbers, lengths: Numbers) -> Numbers:
    """Returns the rows firsts[0], firsts[0] + 1, ..., of all items."""
    offsets = np.repeat(firsts - (np.cumsum(lengths) - lengths), lengths)
    found: Numbers = offsets + np.arange(len(offsets))
    return found


def check_file(path: Path) -> None:
    """Raises ConfigError for what is neither a file nor a link to one: a FIFO would block."""
    if not path.is_file():
        raise ConfigError(f"{str(path)!r} is no regular file; allowed: a file or a link to one")


def plain_record(number: int, row: dict[str, Any]) -> Record:
    """Returns the record of a row of a table that is no output."""
    own = row.get("id")
    paths = (row.get(name) for name in PATHS)
    path = next((each for each in paths if isinstance(each, str) and each), None)
    is_id = isinstance(own, (str, int)) and not isinstance(own, bool)
    return Record(
        id=own if is_id else number + 1 if own is None else str(own),
        path=path if path is not None and os.path.exists(path) else None,
        outcome="ok",
    )
