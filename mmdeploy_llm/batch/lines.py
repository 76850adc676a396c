"""Reads a JSONL file line by line; a line that is not valid JSON becomes a BadItem."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from .items import BadItem

MAX_LINE_BYTES = 64 * 2**20
PIECE_BYTES = 2**20
MAX_SHOWN = 200  # characters of a parser's message


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The parsed values of one line, not checked yet. line: counted from 1."""

    line: int
    values: Any


def read_jsonl(path: Path, *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[Row | BadItem]:
    """Yields the lines of the file in order; blank lines are skipped but counted.

    Holds one line in memory, never more than `max_line_bytes`. A line that is too long or is not
    valid UTF-8 or JSON becomes a BadItem.
    """
    with path.open("rb") as file:
        line = 0
        while raw := file.readline(max_line_bytes + 1):
            line += 1
            if len(raw) > max_line_bytes and not raw.endswith(b"\n"):
                _skip_rest(file)
                message = f"the line is longer than the limit of {max_line_bytes} bytes"
                yield BadItem(line=line, message=f"{message}; name large media by path", code=413)
            elif raw.strip():
                yield _parsed(raw, line)


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


def _parsed(raw: bytes, line: int) -> Row | BadItem:
    if line == 1:
        raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return Row(line=line, values=json.loads(raw.decode("utf-8")))
    except UnicodeDecodeError as error:
        return BadItem(line=line, message=f"the line is not UTF-8: {error.reason}")
    except RecursionError:
        return BadItem(line=line, message="the line is nested too deeply")
    except ValueError as error:
        return BadItem(line=line, message=f"the line is not JSON: {str(error)[:MAX_SHOWN]}")
