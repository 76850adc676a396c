"""Rows: the values that every reader yields, whatever the format, and the interface of a reader."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Protocol

from mmdeploy_llm.errors import RequestError

MAX_MARKS = 2**21  # in one text: each of MARKS can begin a value that takes 200 bytes of memory
MARKS = ",[{"


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError for what is not JSON, is nested too
    deeply, or has too many values for its size."""
    if len(text) > MAX_MARKS and sum(map(text.count, MARKS)) > MAX_MARKS:
        raise ValueError(f"it has more than {MAX_MARKS} commas and brackets")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


DIGEST_BYTES = 8
MAX_SHOWN = 200  # characters of a library's message
MAX_CELL_BYTES = 256 * 2**20  # of one media item; max_media_bytes of the engine sets another limit
JSON_KEYS = (  # keys of our own lines whose value a table may hold as JSON text
    "messages",
    "multimodal_data",
    "multi_modal_data",
    "sampling_params",
    "chat_template_kwargs",
    "mm_processor_kwargs",
    "tools",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The values of one row, not checked yet.

    line: its number in the corpus, from 1.
    values: {column: value}; in JSONL any JSON value.
    key: the id that the format gives to a row, such as the shard and key of WebDataset.
    folder: the base of relative media paths, a path or a URL; None leaves them as they are.
    """

    line: int
    values: Any
    key: str | None = None
    folder: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BadItem:
    """A row, or a file, that cannot be used. id: None when it is missing, unreadable or a
    duplicate. path: of a file. values: those of a row's values that are certain."""

    line: int
    message: str
    id: str | int | None = None
    code: int = RequestError.code
    kind: str = RequestError.__name__
    values: Mapping[str, Any] = field(default_factory=dict)
    path: str | None = None

    @property
    def digest(self) -> str:
        """A digest of what is wrong with the row."""
        data = json.dumps([self.message]).encode()
        return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


class Lines(Protocol):
    """The line numbers that a reader is asked for. It need not read the content of others."""

    def takes(self, line: int) -> bool:
        """Returns whether the line, counted from 1, is wanted."""

    def is_past(self, line: int) -> bool:
        """Returns whether this line and every later one is not wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstLines:
    """The first `count` lines."""

    count: int

    def takes(self, line: int) -> bool:
        """Returns whether the line is one of the first."""
        return line <= self.count

    def is_past(self, line: int) -> bool:
        """Returns whether the line follows the last one that is wanted."""
        return line > self.count


class Rows(Protocol):
    """A corpus, read with memory that does not depend on its size.

    num_rows: the number of its rows, None when that is known only after reading them.
    is_table: whether all rows have the same columns.
    is_by_suffix: whether the suffix of a column's name says that it holds an image or a video.
    is_repeatable: whether it can be read several times.
    """

    is_table: bool
    is_by_suffix: bool

    @property
    def is_repeatable(self) -> bool:
        """See the class."""

    @property
    def num_rows(self) -> int | None:
        """See the class."""

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted rows in order. What is damaged becomes a BadItem."""


def table_row(line: int, values: Mapping[str, Any], folder: str | None = None) -> Row | BadItem:
    """Returns the row of a table: without the null fields of structs, which in a table have all
    fields of the schema, and with the JSON texts of our own keys parsed."""
    given = {name: _without_nulls(value) for name, value in values.items()}
    for name in JSON_KEYS:
        if isinstance(given.get(name), str):
            try:
                given[name] = parse_json(given[name])
            except ValueError as error:
                message = f"the text in column {name} is not JSON: {str(error)[:MAX_SHOWN]}"
                return BadItem(line=line, message=message)
    return Row(line=line, values=given, folder=folder)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
