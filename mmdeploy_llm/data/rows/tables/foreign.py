"""Reads the files of a plugin's format in the child. Whatever the reader does costs a row or what
is left of its file."""

from __future__ import annotations

import datetime
import decimal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from mmdeploy_llm.data.rows.files import File
from mmdeploy_llm.data.rows.packed import open_content
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError, PluginError
from mmdeploy_llm.hooks import CorpusFile, CorpusFormatSpec, DamagedRow
from mmdeploy_llm.hooks.factories import resolve
from mmdeploy_llm.hooks.files import load_named
from mmdeploy_llm.hooks.records import FAULTS, Provided, describe
from mmdeploy_llm.values.text.display import error_text

from .places import BYTES_AT_ONCE, Cursor, Piece, enter_file, lose_file, size_of

MAX_SECONDS = 1.0  # rows are sent at least so often, however slow the reader is
MAX_DEPTH = 64  # of lists and mappings in a value
NO_MEMORY = "it needs more memory than is sensible for its size"
AS_IT_IS = (type(None), bool, int, float, str, bytes)
AS_TEXT = (datetime.datetime, datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)


class ForeignTable:
    """The rows of files that a plugin's function reads. Raises ConfigError when it cannot be
    imported."""

    num_rows: int | None = None

    def __init__(
        self, files: Sequence[File], provided: Provided[CorpusFormatSpec], max_bytes: int
    ) -> None:
        self._files, self._max_bytes = files, max_bytes
        self._about = f"{describe(provided.spec)} of {provided.origin}"
        try:
            if provided.origin.file is not None:
                load_named(provided.origin.file, provided.spec.reader.partition(":")[0])
            self._read = resolve(provided.spec, provided.origin)
        except PluginError as error:
            raise ConfigError(str(error)) from None

    def pieces(self, cursor: Cursor) -> Iterator[Piece]:
        """Yields the wanted rows, numbered through all files."""
        for number in range(cursor.now.file, len(self._files)):
            if cursor.is_past:
                return
            file = self._files[number]
            yield enter_file(cursor, number, file)
            try:
                cursor.bound(size_of(file))
                yield from self._rows(cursor, file)
            except MemoryError:
                yield lose_file(cursor, file, f"{self._about}: {NO_MEMORY}")
            except FAULTS as error:
                yield lose_file(cursor, file, f"{self._about}: {error_text(error)}")

    def _rows(self, cursor: Cursor, file: File) -> Iterator[Piece]:
        content = partial(open_content, file)
        made = self._read(CorpusFile(path=file.path, max_bytes=self._max_bytes, open=content))
        if isinstance(made, (str, bytes, Mapping)) or not isinstance(made, Iterable):
            raise TypeError(f"the reader must yield rows, got {type(made).__name__}")
        rows = iter(made)
        try:
            yield from self._pass_over(rows, cursor)
            yield from self._wanted(rows, cursor)
        finally:
            close = getattr(rows, "close", None)
            if close is not None:
                close()

    def _pass_over(self, rows: Iterator[Any], cursor: Cursor) -> Iterator[Piece]:
        """Goes to the row where a child that has died was."""
        left = cursor.now.row
        while left:
            passed = sum(1 for _ in islice(rows, min(left, cursor.size)))
            if not passed:
                raise ValueError("the reader yields fewer rows than the first time")
            left -= passed
            yield cursor.enter(cursor.name, lost=cursor.lost)  # a sign of life

    def _wanted(self, rows: Iterator[Any], cursor: Cursor) -> Iterator[Piece]:
        """Yields the rows from the cursor on. What was read before a fault is kept."""
        chunk, fault = _Chunk(self._about), None
        while True:
            try:
                is_past = cursor.lines.is_past(cursor.now.line + chunk.num_rows)
                row = None if is_past else next(rows)
            except StopIteration:
                break
            except FAULTS as error:
                fault = error
                break
            if is_past:
                break
            line = cursor.now.line + chunk.num_rows
            values = chunk.checked(row, line) if cursor.lines.takes(line) else None
            if values is not None and chunk.lines and values.keys() != chunk.columns.keys():
                yield chunk.sent(cursor)
                chunk = _Chunk(self._about)
            chunk.add(values, line)
            if chunk.is_full(1 if cursor.is_careful else cursor.size):
                yield chunk.sent(cursor)
                chunk = _Chunk(self._about)
        yield chunk.sent(cursor)
        if fault is not None:
            raise fault


class _Chunk:
    """Some rows with the same columns, copied: a reader may use its objects again."""

    def __init__(self, about: str) -> None:
        self._about, self._begin, self._num_bytes = about, time.monotonic(), 0
        self.num_rows = 0
        self.lines: list[int] = []
        self.columns: dict[str, list[Any]] = {}
        self.faults: list[BadItem] = []

    def checked(self, row: Any, line: int) -> dict[str, Any] | None:
        """Returns the values of a row; None for one that cannot be used, which is noted."""
        try:
            if not isinstance(row, DamagedRow):
                return self._copied(row)
            message = str(row.message)
        except FAULTS as error:
            text = str(error) if isinstance(error, _WrongError) else error_text(error)
            message = f"{self._about}: {text}"
        self.faults.append(BadItem(line=line, message=message))
        return None

    def add(self, values: Mapping[str, Any] | None, line: int) -> None:
        """Takes a row; None for one that is not wanted or cannot be used."""
        self.num_rows += 1
        if values is not None:
            self.lines.append(line)
            for name, value in values.items():
                self.columns.setdefault(name, []).append(value)

    def is_full(self, size: int) -> bool:
        """Returns whether it should be sent."""
        is_late = time.monotonic() - self._begin > MAX_SECONDS
        return self.num_rows >= size or self._num_bytes >= BYTES_AT_ONCE or is_late

    def sent(self, cursor: Cursor) -> Piece:
        """Goes on by its rows."""
        return cursor.took(self.num_rows, self.lines, self.columns, self.faults)

    def _copied(self, row: Any) -> dict[str, Any]:
        if not isinstance(row, Mapping):
            raise _WrongError(f"a row must be a mapping, got {type(row).__name__}")
        copied: dict[str, Any] = self._plain(row, "the row", 0)
        return copied

    def _plain(self, value: Any, where: str, depth: int) -> Any:
        """Returns a copy with which no reader can interfere, of values that can be sent."""
        if type(value) in (*AS_IT_IS, *AS_TEXT):
            self._num_bytes += len(value) if isinstance(value, (str, bytes)) else 8
            return value
        if depth > MAX_DEPTH:
            raise _WrongError(f"{where} is nested more than {MAX_DEPTH} deep")
        if isinstance(value, (bytearray, memoryview)):
            return self._plain(bytes(value), where, depth)
        if isinstance(value, Mapping):
            wrong = [name for name in value if type(name) is not str]
            if wrong:
                raise _WrongError(f"{where} has the name {wrong[0]!r:.40}, which is no text")
            return {
                name: self._plain(own, where if depth else f"column {name!r:.40}", depth + 1)
                for name, own in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self._plain(own, where, depth + 1) for own in value]
        raise _WrongError(
            f"{where} has a {type(value).__name__}, which no row can hold; give a number, a text, "
            "bytes, a date, or lists and mappings of these"
        )


class _WrongError(Exception):
    """A row breaks the contract; the message says how."""
