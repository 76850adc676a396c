"""Reads Lance tables in the child, on this machine or in an object store. Needs the extra `lance`
(pylance)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mmdeploy_llm.data.rows.rows import MAX_SHOWN
from mmdeploy_llm.errors import ConfigError

from .arrow import batch_pieces, no_memory
from .places import Cursor, Piece, Place

ROWS_AT_ONCE = 16
IO_BYTES = 8 * 2**20  # that are read before they are wanted
MAX_LOST = 16  # batches in a row: then the rest of the table is lost


class LanceTable:
    """The rows of a Lance table, in order; blobs as bytes. A batch of 16 rows that cannot be read
    is one error.

    Raises ConfigError when the table cannot be opened.
    """

    def __init__(self, given: str) -> None:
        import lance

        try:
            self._dataset = lance.dataset(given)
            _confine(self._dataset, given)
            self.num_rows: int | None = self._dataset.count_rows()
        except ConfigError:
            raise
        except BaseException as error:  # a panic of Rust is no Exception
            raise ConfigError(
                f"{given!r} cannot be opened as a Lance table: {_reason(error)}"
            ) from None

    def pieces(self, cursor: Cursor) -> Iterator[Piece]:
        """Yields the wanted rows. What cannot be read is left out, one batch at a time."""
        num_lost = 0
        while not cursor.is_past and cursor.now.line <= (self.num_rows or 0):
            begin = cursor.now.line
            try:
                yield from self._scan(cursor)
                return
            except no_memory():
                raise
            except BaseException as error:  # a panic of Rust is no Exception
                if isinstance(error, GeneratorExit):
                    raise
                num_lost = num_lost + 1 if cursor.now.line == begin else 1
                if num_lost > MAX_LOST:
                    self._enter(cursor, (self.num_rows or 0) + 1)
                yield cursor.lose(_reason(error))

    def _scan(self, cursor: Cursor) -> Iterator[Piece]:
        yield self._enter(cursor, cursor.now.line + ROWS_AT_ONCE)
        # One batch ahead: the defaults are to read many, and gigabytes.
        scanner = self._dataset.scanner(
            offset=cursor.now.line - 1,
            limit=ROWS_AT_ONCE if cursor.is_careful else None,
            batch_size=1 if cursor.is_careful else ROWS_AT_ONCE,
            blob_handling="all_binary",
            scan_in_order=True,
            batch_readahead=1,
            fragment_readahead=1,
            io_buffer_size=IO_BYTES,
        )
        for batch in scanner.to_batches():
            yield from batch_pieces(batch, cursor)
            if cursor.is_past:
                return
            if not cursor.is_careful:
                yield self._enter(cursor, cursor.now.line + ROWS_AT_ONCE)

    def _enter(self, cursor: Cursor, end: int) -> Piece:
        """Goes on to the rows up to line `end`, which are lost together."""
        line = min(end, (self.num_rows or 0) + 1)
        name = f"rows {cursor.now.line} to {line - 1}"
        return cursor.enter(name, lost=Place(group=line, line=line), group=cursor.now.line)


def _confine(dataset: Any, given: str) -> None:
    """Raises ConfigError for a table whose manifest names files that are not beneath it."""
    for fragment in dataset.get_fragments():
        for file in fragment.data_files():
            if file.base_id is not None or ".." in file.path.split("/") or file.path[:1] == "/":
                raise ConfigError(
                    f"{given!r} names {file.path[:MAX_SHOWN]!r}, which is not beneath it; copy the "
                    "table, if you trust it"
                )


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
