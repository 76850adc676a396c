"""Reads the rows of a Parquet file, one row group at once. Needs the extra `parquet` (pyarrow).

Columns have the names of a JSONL line's keys. Nested values may be structs or JSON texts; a null
field counts as not given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import ConfigError

from .items import BadItem
from .lines import Row

ROWS_AT_ONCE = 64
JSON_KEYS = (
    "messages",
    "multimodal_data",
    "multi_modal_data",
    "sampling_params",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "tools",
)
MAX_SHOWN = 200  # characters of a library's message


class ParquetRows:
    """A Parquet file that can be iterated several times.

    Raises ConfigError when pyarrow is missing and for a file that is not Parquet.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise ConfigError(
                f"{str(path)!r} is a Parquet file, and reading these needs pyarrow: "
                'pip install "mmdeploy-llm[parquet]", or give a JSONL file'
            ) from None
        self._path = path
        self._module = parquet
        # What pyarrow raises for damaged data.
        self._faults = (pyarrow.ArrowException, OSError, ValueError)
        try:
            with parquet.ParquetFile(path) as file:
                self.num_rows: int = file.metadata.num_rows
        except self._faults as error:
            raise ConfigError(
                f"{str(path)!r} is not a Parquet file: {str(error)[:MAX_SHOWN]}"
            ) from None

    def __iter__(self) -> Iterator[Row | BadItem]:
        """Yields the rows, numbered from 1; unreadable rows of a damaged group are BadItems."""
        first = 1
        with self._module.ParquetFile(self._path) as file:
            for group in range(file.num_row_groups):
                num_rows = file.metadata.row_group(group).num_rows
                yield from self._group(file, group, first, num_rows)
                first += num_rows

    def _group(self, file: Any, group: int, first: int, num_rows: int) -> Iterator[Row | BadItem]:
        line = first
        try:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[group]):
                for values in batch.to_pylist():
                    yield _row(line, values)
                    line += 1
        except self._faults as error:
            message = f"the row group cannot be read: {str(error)[:MAX_SHOWN]}"
            for left in range(line, first + num_rows):
                yield BadItem(line=left, message=message)


def _row(line: int, values: dict[str, Any]) -> Row | BadItem:
    given = _without_nulls(values)
    for name in JSON_KEYS:
        if isinstance(given.get(name), str):
            try:
                given[name] = json.loads(given[name])
            except (ValueError, RecursionError) as error:
                message = f"the text in column {name} is not JSON: {str(error)[:MAX_SHOWN]}"
                return BadItem(line=line, message=message)
    return Row(line=line, values=given)


def _without_nulls(value: Any) -> Any:
    """Removes the null fields of structs: in Parquet every row has all fields of the schema."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
