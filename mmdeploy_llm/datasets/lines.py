"""Reads JSONL files line by line; a line that is not valid JSON becomes a BadItem."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from .files import File
from .rows import MAX_CELL_BYTES, MAX_SHOWN, BadItem, Lines, Row

MAX_LINE_BYTES = 64 * 2**20
PIECE_BYTES = 2**20
MAX_COUNTED_BYTES = 2**30  # the lines of more are not counted in advance


class JsonlRows:
    """The lines of JSONL files; blank lines are skipped but counted.

    Holds one line in memory, never more than `max_line_bytes`. A line that is too long or is not
    valid UTF-8 or JSON becomes a BadItem.
    """

    is_table = False
    is_by_suffix = False
    is_repeatable = True

    def __init__(
        self,
        files: Sequence[File],
        max_bytes: int = MAX_CELL_BYTES,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
    ) -> None:
        self._files, self._max_line_bytes = files, max_line_bytes

    @property
    def num_rows(self) -> int | None:
        """The number of lines, None where counting them would take long."""
        paths = [Path(file.path) for file in self._files if not file.is_remote]
        if len(paths) < len(self._files):
            return None
        is_small = sum(path.stat().st_size for path in paths) <= MAX_COUNTED_BYTES
        return sum(map(count_lines, paths)) if is_small else None

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted lines, numbered through all files."""
        line = 0
        for file in self._files:
            begin = line
            try:
                with file.open() as opened:
                    while raw := opened.readline(self._max_line_bytes + 1):
                        line += 1
                        if lines.is_past(line):
                            return
                        row = self._row(opened, raw, line, file.folder, is_first=line == begin + 1)
                        if row is not None and lines.takes(line):
                            yield row
            except OSError as error:
                line += 1
                if lines.takes(line):
                    yield unreadable(file, line, error)

    def _row(
        self, opened: BinaryIO, raw: bytes, line: int, folder: str, *, is_first: bool
    ) -> Row | BadItem | None:
        if len(raw) > self._max_line_bytes and not raw.endswith(b"\n"):
            _skip_rest(opened)
            message = f"the line is longer than the limit of {self._max_line_bytes} bytes"
            return BadItem(line=line, message=f"{message}; name large media by path", code=413)
        if is_first:
            raw = raw.removeprefix(codecs.BOM_UTF8)
        return _parsed(raw, line, folder) if raw.strip() else None


def unreadable(file: File, line: int, error: Exception) -> BadItem:
    """Returns the error of a file that cannot be read, or no further."""
    message = f"{file.name!r} cannot be read: {str(error)[:MAX_SHOWN]}"
    return BadItem(line=line, id=file.name, message=message)


def count_lines(path: Path) -> int:
    """Returns the number of lines, including a last line without a line break."""
    num_lines, last = 0, b"\n"
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            num_lines += piece.count(b"\n")
            last = piece[-1:]
    return num_lines + (last != b"\n")


def _skip_rest(file: BinaryIO) -> None:
    while piece := file.readline(PIECE_BYTES):
        if piece.endswith(b"\n"):
            return


def _parsed(raw: bytes, line: int, folder: str) -> Row | BadItem:
    try:
        return Row(line=line, values=json.loads(raw.decode("utf-8")), folder=folder)
    except UnicodeDecodeError as error:
        return BadItem(line=line, message=f"the line is not UTF-8: {error.reason}")
    except RecursionError:
        return BadItem(line=line, message="the line is nested too deeply")
    except ValueError as error:
        return BadItem(line=line, message=f"the line is not JSON: {str(error)[:MAX_SHOWN]}")
