"""Reads Parquet files and Arrow's IPC files and streams (Feather among them). Needs the extra
`parquet` (pyarrow).

Media are bytes in a column, or the struct {"bytes", "path"} of Hugging Face datasets.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from mmdeploy_llm.errors import ConfigError

from .files import File
from .lines import unreadable
from .rows import MAX_CELL_BYTES, MAX_SHOWN, BadItem, Lines, Row, table_row

ROWS_AT_ONCE, BYTES_AT_ONCE = 64, 16 * 2**20  # converted to Python at once
BUFFER_BYTES = 2**20  # read at once of each column
MAX_COUNTED_FILES = 1000  # the rows of more files are not counted in advance


class ParquetRows:
    """The rows of Parquet files, read in small batches.

    Raises ConfigError when pyarrow is missing, and for a single file that is not Parquet; of
    several, one that cannot be read becomes a BadItem, as do the unreadable rows of a group.
    """

    is_table = True
    is_by_suffix = False
    is_repeatable = True

    def __init__(self, files: Sequence[File], max_bytes: int = MAX_CELL_BYTES) -> None:
        self._files = files
        self._module = _pyarrow("pyarrow.parquet", files, "Parquet")
        self._faults = _faults(files, "Parquet")
        if len(files) == 1:
            try:
                self._open(files[0]).close()
            except self._faults as error:
                raise ConfigError(
                    f"{files[0].path!r} is not a Parquet file: {str(error)[:MAX_SHOWN]}"
                ) from None

    @property
    def num_rows(self) -> int | None:
        """The number of rows in all files, None where counting them would take long."""
        if len(self._files) > MAX_COUNTED_FILES or any(file.is_remote for file in self._files):
            return None
        return sum(map(self._count, self._files))

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted rows, numbered through all files."""
        first = 1
        for file in self._files:
            try:
                with self._open(file) as opened:
                    for group in range(opened.num_row_groups):
                        if lines.is_past(first):
                            return
                        yield from self._group(opened, group, first, lines, file)
                        first += opened.metadata.row_group(group).num_rows
            except self._faults as error:
                if lines.takes(first):
                    yield unreadable(file, first, error)
                first += 1

    def _open(self, file: File) -> Any:
        # Buffered: only the pages of the next rows are read, not a whole group of images.
        source = file.open() if file.is_remote else file.path
        return self._module.ParquetFile(source, buffer_size=BUFFER_BYTES, pre_buffer=False)

    def _count(self, file: File) -> int:
        try:
            with self._open(file) as opened:
                return int(opened.metadata.num_rows)
        except self._faults:
            return 1  # the error

    def _group(
        self, opened: Any, group: int, first: int, lines: Lines, file: File
    ) -> Iterator[Row | BadItem]:
        rows, line = opened.metadata.row_group(group), first
        size = _rows_at_once(rows.total_byte_size, rows.num_rows)
        try:
            for batch in opened.iter_batches(batch_size=size, row_groups=[group]):
                yield from batch_rows(batch, line, lines, file.folder)
                line += batch.num_rows
        except self._faults as error:
            message = f"the row group cannot be read: {str(error)[:MAX_SHOWN]}"
            for left in filter(lines.takes, range(line, first + rows.num_rows)):
                yield BadItem(line=left, message=message)


class ArrowRows:
    """The rows of IPC files and streams, batch by batch. Local files are mapped, so that only the
    rows that are looked at use memory.

    Raises ConfigError when pyarrow is missing; a file that cannot be read becomes a BadItem.
    """

    is_table = True
    is_by_suffix = False
    is_repeatable = True
    num_rows = None  # a stream does not say it

    def __init__(self, files: Sequence[File], max_bytes: int = MAX_CELL_BYTES) -> None:
        self._files = files
        self._arrow = _pyarrow("pyarrow", files, "Arrow")
        self._ipc = _pyarrow("pyarrow.ipc", files, "Arrow")
        self._faults = _faults(files, "Arrow")

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted rows, numbered through all files."""
        first = 1
        for file in self._files:
            try:
                with self._source(file) as source:
                    for batch in self._batches(source):
                        if lines.is_past(first):
                            return
                        yield from batch_rows(batch, first, lines, file.folder)
                        first += batch.num_rows
            except self._faults as error:
                if lines.takes(first):
                    yield unreadable(file, first, error)
                first += 1

    def _source(self, file: File) -> Any:
        return file.open() if file.is_remote else self._arrow.memory_map(file.path)

    def _batches(self, source: Any) -> Iterator[Any]:
        try:
            reader = self._ipc.open_file(source)
        except self._arrow.ArrowInvalid:  # the end of a file differs from that of a stream
            source.seek(0)
            yield from self._ipc.open_stream(source)
            return
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)


def batch_rows(
    batch: Any, first: int, lines: Lines, folder: str | None = None
) -> Iterator[Row | BadItem]:
    """Yields the wanted rows of a batch or table of Arrow whose first row is line `first`, a few
    converted at once."""
    size = _rows_at_once(batch.nbytes, batch.num_rows)
    for begin in range(0, batch.num_rows, size):
        piece = batch.slice(begin, size)
        numbers = range(first + begin, first + begin + piece.num_rows)
        wanted = [line for line in numbers if lines.takes(line)]
        if len(wanted) == len(numbers):
            found = piece.to_pylist()
        else:  # of the others nothing is copied
            found = [piece.slice(line - numbers[0], 1).to_pylist()[0] for line in wanted]
        for line, values in zip(wanted, found, strict=True):
            yield table_row(line, values, folder)


def _rows_at_once(num_bytes: int, num_rows: int) -> int:
    return max(1, min(ROWS_AT_ONCE, BYTES_AT_ONCE * num_rows // max(num_bytes, 1)))


def _pyarrow(module: str, files: Sequence[File], kind: str) -> Any:
    try:
        import pyarrow

        return importlib.import_module(module) if module != "pyarrow" else pyarrow
    except ImportError:
        raise ConfigError(
            f"{files[0].path!r} is of the format {kind}, and reading it needs pyarrow: "
            'pip install "mmdeploy-llm[parquet]", or give a JSONL file'
        ) from None


def _faults(files: Sequence[File], kind: str) -> tuple[type[Exception], ...]:
    """Returns what pyarrow raises for damaged data."""
    return (_pyarrow("pyarrow", files, kind).ArrowException, OSError, ValueError)
