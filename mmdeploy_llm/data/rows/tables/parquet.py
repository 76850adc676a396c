"""Reads Parquet files in the child, row group by row group. Needs the extra `parquet` (pyarrow)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from mmdeploy_llm.data.rows.files import File
from mmdeploy_llm.data.rows.rows import MAX_SHOWN
from mmdeploy_llm.errors import ConfigError

from .arrow import NeedsCareError, batch_pieces, can_hold, check_depth, faults, library, no_memory
from .places import (
    BYTES_AT_ONCE,
    ROWS_AT_ONCE,
    Cursor,
    Piece,
    Place,
    enter_file,
    lose_file,
    size_of,
)

BUFFER_BYTES = 2**20  # read at once of each column
MAX_COUNTED_FILES = 1000  # the rows of more files are not counted in advance
MAX_RATIO = 20  # of a column's bytes to those in the file: above it all may be one repeated value


class ParquetTable:
    """The rows of Parquet files, read in small batches.

    Raises ConfigError for a single file that is not Parquet; of several, one that cannot be read
    becomes a BadItem, as does a row group.
    """

    def __init__(self, files: Sequence[File], *, is_counted: bool = True) -> None:
        self._files = files
        self._module = library("pyarrow.parquet")
        if len(files) == 1 and is_counted:
            try:
                self._open(files[0]).close()
            except faults() as error:
                raise ConfigError(
                    f"{files[0].path!r} is not a Parquet file: {str(error)[:MAX_SHOWN]}"
                ) from None
        self.num_rows = self._num_rows() if is_counted else None

    def pieces(self, cursor: Cursor) -> Iterator[Piece]:
        """Yields the wanted rows, numbered through all files."""
        for number in range(cursor.now.file, len(self._files)):
            if cursor.is_past:
                return
            file = self._files[number]
            yield enter_file(cursor, number, file)
            try:
                with self._open(file) as opened:
                    claims = _claims(opened.metadata, size_of(file))
                    for group in range(cursor.now.group, len(claims)):
                        if cursor.is_past:
                            return
                        yield from self._group(opened, group, claims[group], cursor, file)
            except faults() as error:
                yield lose_file(cursor, file, error)

    def _open(self, file: File) -> Any:
        # Buffered: only the pages of the next rows are read, not a whole group of images.
        source = file.open() if file.is_remote else file.path
        opened = self._module.ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False)
        check_depth(opened.schema_arrow)
        return opened

    def _num_rows(self) -> int | None:
        """Returns the number of rows in all files, None where counting them would take long."""
        if len(self._files) > MAX_COUNTED_FILES or any(file.is_remote for file in self._files):
            return None
        return sum(map(self._count, self._files))

    def _count(self, file: File) -> int:
        try:
            with self._open(file) as opened:
                claims = _claims(opened.metadata, size_of(file))
        except faults():
            return 1  # the error
        return sum(1 if claim is None else claim for claim in claims)

    def _group(
        self, opened: Any, group: int, claim: int | None, cursor: Cursor, file: File
    ) -> Iterator[Piece]:
        """Yields the rows of a group. claim: their number, None when it cannot be true."""
        here, about = cursor.now, opened.metadata.row_group(group)
        first = here.line - here.row if here.group == group else here.line
        end = Place(file=here.file, group=group + 1, line=first + (1 if claim is None else claim))
        yield cursor.enter(f"{file.name} row group {group}", lost=end, group=group)
        if claim is None:
            yield cursor.lose(f"its file claims {about.num_rows} rows or more for its size")
            return
        cursor.bound(min(_bytes_in_file(about), size_of(file)))
        try:
            yield from self._batches(opened, cursor, about, claim)
            if cursor.now.row < claim and not cursor.is_past:
                yield cursor.lose(f"it ends after {cursor.now.row} of {claim} rows")
            cursor.now = end
        except no_memory():
            if not cursor.is_careful:
                raise NeedsCareError from None
            yield cursor.lose("it needs more memory than is sensible for its size")
        except faults() as error:
            yield cursor.lose(error)

    def _batches(self, opened: Any, cursor: Cursor, about: Any, claim: int) -> Iterator[Piece]:
        size = 1 if cursor.is_careful else _rows_at_once(about)
        group, first = cursor.now.group, 0
        for batch in opened.iter_batches(batch_size=size, row_groups=[group], use_threads=False):
            skipped = cursor.now.row - first
            first += batch.num_rows
            if skipped < batch.num_rows:
                yield from batch_pieces(batch.slice(skipped, claim - cursor.now.row), cursor)
            if cursor.is_past or cursor.now.row >= claim:
                return


def _claims(metadata: Any, num_bytes: int) -> list[int | None]:
    """Returns the number of rows of each group; None from where on they are too many for the size
    of the file."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    claims = [group.num_rows for group in groups]
    totals = accumulate(abs(claim) for claim in claims)
    return [
        claim if claim >= 0 and can_hold(num_bytes, total) else None
        for claim, total in zip(claims, totals, strict=True)
    ]


def _bytes_in_file(group: Any) -> int:
    columns = map(group.column, range(group.num_columns))
    return sum(max(column.total_compressed_size, 0) for column in columns)


def _rows_at_once(group: Any) -> int:
    """Returns how many rows of a group are decoded at once, by what its columns claim. What they
    do not say, such as how large a value that is stored once is, the limit of memory finds."""
    sizes = [max(group.total_byte_size, 1) / max(group.num_rows, 1)]
    for column in map(group.column, range(group.num_columns)):
        is_once = column.has_dictionary_page and column.physical_type == "BYTE_ARRAY"
        if is_once and column.total_uncompressed_size > MAX_RATIO * column.total_compressed_size:
            sizes.append(column.total_uncompressed_size)
    return max(1, min(ROWS_AT_ONCE, int(BYTES_AT_ONCE / max(sizes))))
