"""Parts that are .npy files: an array of the vectors, which numpy reads and maps, then a line of
JSON for each record.

    header of .npy | float32 [rows, size] | its digest | configurations | record | record ...

numpy reads as many numbers as the header says, and does not see the lines. The `embedding` of a
record there is null, or {"row": its first row in this array, "shape": [size] or [tokens, size]}.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from io import BufferedReader
from typing import IO, TYPE_CHECKING, Any

from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.item import Vector
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError

from .formats import (
    CompletePart,
    Drops,
    PartReader,
    damaged,
    first_positions,
)
from .lines import LineParts, LineReader, new_file
from .scan import Entry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TYPE = "<f4"
MAX_SHOWN = 200  # characters of a message of numpy
new_digest = partial(blake2b, digest_size=16)  # of an array


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The header of a .npy file. shape: of the array. begin: where it begins, in bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    begin: int

    @property
    def end(self) -> int:
        """The position after the array."""
        return self.begin + math.prod(self.shape) * self.dtype.itemsize


def read_head(file: IO[bytes], name: str) -> Head:
    """Reads the header of a .npy file, which stands at its begin. Raises ConfigError for a file
    that is none, whose array is in Fortran's order or has objects, and for one that is cut off."""
    from numpy.lib import format as npy

    try:
        version = npy.read_magic(file)
        readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"its version of .npy, {version}, is not known")
        shape, is_fortran, dtype = readers[version](file)
    except Exception as error:  # numpy reads it as Python's text, and raises whatever that does
        words = str(error)[:MAX_SHOWN] or type(error).__name__
        raise ConfigError(f"{name!r} is not a .npy file: {words}") from None
    if not all(type(own) is int and own >= 0 for own in shape):
        raise ConfigError(f"{name!r} is not a .npy file: its shape is {str(shape)[:MAX_SHOWN]}")
    if is_fortran or dtype.hasobject:
        words = "is stored column by column" if is_fortran else "has Python objects"
        raise ConfigError(
            f"{name!r}: its array {words}; save it with numpy.save(name, "
            "numpy.ascontiguousarray(vectors, 'float32'))"
        )
    head = Head(shape=shape, dtype=dtype, begin=file.tell())
    size = file.seek(0, os.SEEK_END)
    if size < head.end:
        raise ConfigError(
            f"{name!r} is cut off: it has {size} bytes, and its array ends at {head.end}; copy it "
            "again, or have it written again"
        )
    return head


class NpyParts(LineParts):
    """Parts that are .npy files; see PartFormat."""

    def __init__(self, most_items: int | None) -> None:
        super().__init__(most_items)
        self._size: int | None = None  # numbers of a vector, once one is known

    def reader(self, file: IO[bytes], name: str, *, is_open: bool) -> PartReader:
        """Opens a part or the journal."""
        return LineReader(file, name) if is_open else NpyReader(file, name)

    def seal(self, folder: Folder, name: str, configurations: str | None) -> str:
        """Writes the journal as a part."""
        partial = f"{name}.partial"
        try:
            with (
                BufferedReader(folder.open_file(name, os.O_RDONLY)) as journal,
                new_file(folder, partial) as file,
            ):
                self._write(file, LineReader(journal, name), configurations, frozenset())
        except (ConfigError, OSError):
            folder.remove(partial)
            raise
        return partial

    def copy_without(self, file: IO[bytes], drops: Drops, out: IO[bytes], *, is_open: bool) -> bool:
        """Copies the other records with their vectors."""
        if is_open:
            return super().copy_without(file, drops, out, is_open=True)
        part = NpyReader(file, "a part")
        return self._write(out, part, part.configurations(), first_positions(drops))

    def outdated(self, parts: Iterable[CompletePart]) -> list[int]:
        """Returns the numbers of parts without a vector that do not say how many numbers one
        has."""
        found = []
        for part in parts:
            with part.open() as file:
                head = read_head(file, part.open_name)
            self._size = self._size or head.shape[1]
            found.append((part.number, head.shape[1]))
        return [number for number, size in found if size != (self._size or 0)]

    def _write(
        self,
        out: IO[bytes],
        source: LineReader | NpyReader,
        configurations: str | None,
        dropped: frozenset[int],
    ) -> bool:
        """Writes the records of a source that are not dropped; returns whether there is any."""
        from numpy.lib import format as npy

        records = [own.record for own in source.entries() if own.begin not in dropped]
        rows = sum(_num_rows(record.embedding) for record in records)
        size = self._sized(records)
        npy.write_array_header_2_0(
            out, {"descr": TYPE, "fortran_order": False, "shape": (rows, size)}
        )
        digest = new_digest()
        for record in records:
            if record.embedding is not None:
                data = record.embedding.array().tobytes()
                digest.update(data)
                out.write(data)
        lines = ("", digest.hexdigest(), configurations or "{}", "")
        out.write("\n".join(lines).encode())
        row = 0
        for record in records:
            out.write(_line(record, row))
            row += _num_rows(record.embedding)
        return bool(records)

    def _sized(self, records: Iterable[Record]) -> int:
        """Returns the numbers of each vector. Raises ConfigError where they differ."""
        for record in records:
            own = None if record.embedding is None else record.embedding.shape[-1]
            if own is not None and own != (self._size or own):
                raise ConfigError(
                    f"the vectors of this output have {self._size} numbers, and that of "
                    f"{record.id!r} has {own}: an array has one size. Write to another --output, "
                    "or to NAME.parquet, which holds both"
                )
            self._size = own or self._size
        return self._size or 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The rows of a record's vectors in the array. num_rows: 0 where it has none. is_many: whether
    it has one for each token."""

    row: int = 0
    num_rows: int = 0
    is_many: bool = False


class NpyReader:
    """One part; the position of a record is the number of its line."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        head = read_head(file, name)
        if len(head.shape) != 2 or head.dtype.str != TYPE:
            raise damaged(name, f"its array is {head.dtype.name} {list(head.shape)}")
        self.head = head
        file.seek(head.begin)
        self._data = file.read(head.end - head.begin)
        if file.read(1) != b"\n":
            raise damaged(name, "it has an array and no records")
        digest = new_digest(self._data).hexdigest()
        if file.readline().strip() != digest.encode():
            raise damaged(name, "its array is not the one that was written")
        self._configurations = file.readline()
        self._lines = file.read().split(b"\n")
        if self._lines.pop() != b"":
            raise damaged(name, "its last record is cut off")

    @property
    def array(self) -> NDArray[np.float32]:
        """The vectors, which must not be written to."""
        import numpy as np

        return np.frombuffer(self._data, TYPE).reshape(self.head.shape)

    def entries(self) -> Iterator[Entry]:
        """Yields the records."""
        for number in range(len(self._lines)):
            yield Entry(begin=number, end=number + 1, record=self.at(number))

    def places(self) -> list[Place]:
        """Returns where the vectors of each record are."""
        found = []
        for number in range(len(self._lines)):
            with self._reading(number):
                found.append(self._place(json.loads(self._lines[number]).get("embedding")))
        return found

    def at(self, position: int) -> Record:
        """Returns the record of a line."""
        with self._reading(position):
            record, place = self._record(position)
            if not place.num_rows:
                return record
            rows = self.array[place.row : place.row + place.num_rows]
            return replace(record, embedding=Vector.of(rows if place.is_many else rows[0]))
        raise AssertionError("a record was read, or an error raised")

    def keys(self) -> Iterator[str]:
        """Yields the keys of the records, without reading their vectors."""
        for number in range(len(self._lines)):
            with self._reading(number):
                yield self._record(number)[0].key

    def media(self, position: int) -> AbstractContextManager[None]:
        """Returns None: parts hold no media."""
        return nullcontext()

    def configurations(self) -> str | None:
        """Returns those of the first line."""
        text = self._configurations.decode("utf-8", "replace").strip()
        return None if text == "{}" else text

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @contextmanager
    def _reading(self, number: int) -> Iterator[None]:
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise damaged(self._name, f"line {number + 1} is no record ({error})") from None

    def _record(self, number: int) -> tuple[Record, Place]:
        """Returns the record of a line without its vectors, and where these are."""
        values = json.loads(self._lines[number])
        place = self._place(values.get("embedding"))
        return Record.from_values({**values, "embedding": None}), place

    def _place(self, own: Any) -> Place:
        if own is None:
            return Place()
        row, shape = own["row"], own["shape"]
        num_rows = math.prod(shape[:-1])
        if not 0 <= row < row + num_rows <= self.head.shape[0] or shape[-1] != self.head.shape[1]:
            raise ValueError(f"its array has no rows {row} to {row + num_rows}")
        return Place(row=row, num_rows=num_rows, is_many=len(shape) == 2)


def _num_rows(vector: Vector | None) -> int:
    """Returns the rows that a vector takes in the array."""
    return 0 if vector is None else math.prod(vector.shape[:-1])


def _line(record: Record, row: int) -> bytes:
    """Returns the line of a record."""
    own = record.embedding
    text = (record if own is None else replace(record, embedding=None)).to_json()
    if own is None:
        return text.encode() + b"\n"
    place = json.dumps({"row": row, "shape": own.shape})
    return f'{text[:-1]}, "embedding": {place}}}\n'.encode()
