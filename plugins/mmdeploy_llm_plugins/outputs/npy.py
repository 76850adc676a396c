"""Parts that are .npy files: an array of the vectors, which numpy reads and maps, then a line of
JSON for each record.

    header of .npy | float32 [rows, size] | its digest | configurations | record | record ...

numpy reads as many numbers as the header says, and does not see the lines. The `embedding` of a
record there is null, or {"row": its first row in this array, "shape": [size] or [tokens, size]}.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import IO, TYPE_CHECKING, Any

from mmdeploy_llm.data.outputs.public import (
    ArrayPlace,
    CompletePart,
    Drops,
    Entry,
    LineParts,
    LineReader,
    PartReader,
    Record,
    Vector,
    damaged,
    first_positions,
    read_npy_head,
)
from mmdeploy_llm.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TYPE = "<f4"
new_digest = partial(blake2b, digest_size=16)  # of an array


class NpyParts(LineParts):
    """Parts that are .npy files; see PartFormat."""

    has_arrays = True

    def __init__(self, most_items: int | None) -> None:
        super().__init__(most_items)
        self._size: int | None = None  # numbers of a vector, once one is known

    def reader(self, file: IO[bytes], name: str, *, is_open: bool) -> PartReader:
        """Opens a part or the journal."""
        return LineReader(file, name) if is_open else NpyReader(file, name)

    def seal(
        self,
        file: IO[bytes],
        name: str,
        new: Callable[[], IO[bytes]],
        configurations: str | None,
    ) -> bool:
        """Writes the journal as a part."""
        with new() as out:
            self._write(out, LineReader(file, name), configurations, frozenset())
        return True

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
                head = read_npy_head(file, part.open_name)
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


class NpyReader:
    """One part; see ArrayReader."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        head = read_npy_head(file, name)
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

    def places(self) -> list[ArrayPlace]:
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

    def _record(self, number: int) -> tuple[Record, ArrayPlace]:
        """Returns the record of a line without its vectors, and where these are."""
        values = json.loads(self._lines[number])
        place = self._place(values.get("embedding"))
        return Record.from_values({**values, "embedding": None}), place

    def _place(self, own: Any) -> ArrayPlace:
        if own is None:
            return ArrayPlace()
        row, shape = own["row"], own["shape"]
        num_rows = math.prod(shape[:-1])
        if not 0 <= row < row + num_rows <= self.head.shape[0] or shape[-1] != self.head.shape[1]:
            raise ValueError(f"its array has no rows {row} to {row + num_rows}")
        return ArrayPlace(row=row, num_rows=num_rows, is_many=len(shape) == 2)


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
