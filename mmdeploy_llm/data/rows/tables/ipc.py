"""Reads Arrow's IPC files and streams (Feather among them) in the child, batch by batch. Needs the
extra `parquet` (pyarrow)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from mmdeploy_llm.data.rows.files import File

from .arrow import DamagedError, batch_pieces, can_hold, check_depth, faults, library, no_memory
from .places import Cursor, Piece, Place, enter_file, lose_file, size_of


class ArrowTable:
    """The rows of IPC files and streams. Local files are mapped, so that only the rows that are
    looked at use memory. A file that cannot be read becomes a BadItem, as does a batch."""

    def __init__(self, files: Sequence[File], *, is_counted: bool = False) -> None:
        """is_counted: whether the batches are counted in advance, of which only the heads are
        read."""
        self._files = files
        self._arrow, self._ipc = library(), library("pyarrow.ipc")
        self.num_rows = sum(map(self._count, files)) if is_counted else None

    def pieces(self, cursor: Cursor) -> Iterator[Piece]:
        """Yields the wanted rows, numbered through all files."""
        for number in range(cursor.now.file, len(self._files)):
            if cursor.is_past:
                return
            file = self._files[number]
            yield enter_file(cursor, number, file)
            cursor.bound(size_of(file))
            try:
                with self._source(file) as source:
                    yield from self._batches(source, cursor, file)
            except no_memory():
                yield lose_file(cursor, file, "it needs more memory than is sensible for its size")
            except faults() as error:
                yield lose_file(cursor, file, error)

    def _count(self, file: File) -> int:
        try:
            with self._source(file) as source:
                reader, is_stream = self._open(source)
                batches = reader if is_stream else _batches_of(reader)
                total = sum(batch.num_rows for batch in batches)
                return total if can_hold(size_of(file), total) else 1
        except faults():
            return 1  # the error

    def _source(self, file: File) -> Any:
        return file.open() if file.is_remote else self._arrow.memory_map(file.path)

    def _open(self, source: Any) -> tuple[Any, bool]:
        """Returns a reader, and whether it is one of a stream, whose batches are not listed."""
        try:
            return self._ipc.open_file(source), False
        except self._arrow.ArrowInvalid:  # the end of a file differs from that of a stream
            source.seek(0)
            return self._ipc.open_stream(source), True

    def _batches(self, source: Any, cursor: Cursor, file: File) -> Iterator[Piece]:
        reader, is_stream = self._open(source)
        check_depth(reader.schema)
        group, num_rows = cursor.now.group, 0
        if is_stream:
            for _ in range(group):
                num_rows += reader.read_next_batch().num_rows
        while is_stream or group < reader.num_record_batches:
            if cursor.is_past:
                return
            here = cursor.now
            following = (
                {"file": here.file + 1} if is_stream else {"file": here.file, "group": group + 1}
            )
            end = Place(**following, line=here.line + 1)
            yield cursor.enter(f"{file.name} batch {group}", lost=end, group=group)
            try:
                batch = reader.read_next_batch() if is_stream else reader.get_batch(group)
            except StopIteration:
                return
            except faults() as error:
                if is_stream:
                    raise
                yield cursor.lose(error)
            else:
                num_rows += batch.num_rows
                if not can_hold(size_of(file), num_rows):
                    raise DamagedError(f"it claims {num_rows} rows in {size_of(file)} bytes")
                yield from self._batch(batch, cursor)
            group += 1

    def _batch(self, batch: Any, cursor: Cursor) -> Iterator[Piece]:
        here = cursor.now
        line = here.line - here.row + batch.num_rows
        yield cursor.enter(cursor.name, lost=Place(file=here.file, group=here.group + 1, line=line))
        try:
            yield from batch_pieces(batch.slice(here.row), cursor)
        except faults() as error:
            yield cursor.lose(error)
        else:
            cursor.now = replace(cursor.now, group=here.group + 1, row=0)


def _batches_of(reader: Any) -> Iterator[Any]:
    return map(reader.get_batch, range(reader.num_record_batches))
