"""Reads JSONL files line by line; a line that is not valid JSON becomes a BadItem."""

from __future__ import annotations

import codecs
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from mmdeploy_llm.values.text.encodings import not_utf8

from .files import File
from .packed import is_packed, open_content
from .rows import MAX_CELL_BYTES, MAX_SHOWN, BadItem, Lines, Row, parse_json

MAX_LINE_BYTES = 64 * 2**20
PIECE_BYTES = 2**20
MAX_COUNTED_BYTES = 2**30  # the lines of more are not counted in advance
BLANK = b" \t\r\n"


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
        if any(file.is_remote or is_packed(file.path) for file in self._files):
            return None
        paths = [Path(file.path) for file in self._files]
        is_small = sum(path.stat().st_size for path in paths) <= MAX_COUNTED_BYTES
        return sum(map(count_lines, paths)) if is_small else None

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted lines, numbered through all files."""
        line = 0
        for file in self._files:
            begin = line
            try:
                with open_content(file) as opened:
                    while raw := opened.readline(self._max_line_bytes + 1):
                        line += 1 if raw != b"\n" else 1 + skip_blank(opened)
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


def unreadable(file: File, line: int, error: Exception | str) -> BadItem:
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


def skip_blank(file: BinaryIO) -> int:
    """Skips the blank lines that are in the file's buffer; returns their number. One by one, 100 MB
    of them would take minutes."""
    ahead: bytes = file.peek() if isinstance(file, io.BufferedReader) else b""
    end = ahead.rfind(b"\n", 0, len(ahead) - len(ahead.lstrip(BLANK))) + 1
    return file.read(end).count(b"\n")


def _skip_rest(file: BinaryIO) -> None:
    while piece := file.readline(PIECE_BYTES):
        if piece.endswith(b"\n"):
            return


def _parsed(raw: bytes, line: int, folder: str) -> Row | BadItem:
    try:
        return Row(line=line, values=parse_json(raw.decode("utf-8")), folder=folder)
    except UnicodeDecodeError:
        return BadItem(line=line, message=f"the line is {not_utf8(raw)}")
    except ValueError as error:
        if b"\0" in raw:
            return BadItem(line=line, message=f"the line is {not_utf8(raw)}")
        return BadItem(line=line, message=f"the line is not JSON: {str(error)[:MAX_SHOWN]}")
