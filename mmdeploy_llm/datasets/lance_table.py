"""Reads Lance tables, on this machine or in an object store. Needs the extra `lance` (pylance)."""

from __future__ import annotations

from collections.abc import Iterator

from mmdeploy_llm.errors import ConfigError

from .arrow import batch_rows
from .rows import MAX_CELL_BYTES, MAX_SHOWN, BadItem, Lines, Row

ROWS_AT_ONCE = 16
IO_BYTES = 8 * 2**20  # that are read before they are wanted


def is_lance(given: str) -> bool:
    """Returns whether an input is a Lance table: a folder or URL that ends in .lance."""
    return given.rstrip("/").endswith(".lance")


class LanceRows:
    """The rows of a Lance table, in order; blobs as bytes.

    Raises ConfigError when pylance is missing or the table cannot be opened.
    """

    is_table = True
    is_by_suffix = False
    is_repeatable = True

    def __init__(self, given: str, max_bytes: int = MAX_CELL_BYTES) -> None:
        try:
            import lance

            self._dataset = lance.dataset(given)
            self.num_rows: int | None = self._dataset.count_rows()
        except ImportError:
            raise ConfigError(
                f"{given!r} is a Lance table, and reading it needs pylance: "
                'pip install "mmdeploy-llm[lance]", or give Parquet files'
            ) from None
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"{given!r} cannot be opened as a Lance table: {str(error)[:MAX_SHOWN]}"
            ) from None

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted rows. A table that cannot be read further ends with an error."""
        first = 1
        # One batch ahead: the defaults are to read many, and gigabytes.
        scanner = self._dataset.scanner(
            batch_size=ROWS_AT_ONCE,
            blob_handling="all_binary",
            scan_in_order=True,
            batch_readahead=1,
            fragment_readahead=1,
            io_buffer_size=IO_BYTES,
        )
        try:
            for batch in scanner.to_batches():
                if lines.is_past(first):
                    return
                yield from batch_rows(batch, first, lines)
                first += batch.num_rows
        except (OSError, ValueError, RuntimeError) as error:
            message = f"the table cannot be read from row {first} on: {str(error)[:MAX_SHOWN]}"
            yield BadItem(line=first, id=f"row {first} and later ones", message=message)
