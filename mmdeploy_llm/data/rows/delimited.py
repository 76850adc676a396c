"""Reads CSV and TSV files, whose first line names the columns. Media are paths in a column."""

from __future__ import annotations

import codecs
import csv
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from mmdeploy_llm.values.text.encodings import is_utf8, not_utf8

from .files import File, suffix_of
from .lines import skip_blank, unreadable
from .packed import open_content, unpacked_name
from .rows import MAX_CELL_BYTES, BadItem, Lines, Row, table_row

MAX_LINE_BYTES = 2**20  # of one line of text; csv itself allows 128 KiB in one field
MAX_UNDONE = 100  # rows of a file with an open quote after which lines are read again
UNCLOSED = "a quote is opened and not closed"
MAX_BLANK = 2**18  # blank lines in a row that are handed to csv: more do not fit into one field


class DelimitedRows:
    """The rows of CSV and TSV files. Every value is a text; an empty one counts as not given.

    A row that has more or fewer fields than there are columns, or is not UTF-8, becomes a BadItem,
    and so does the line where a quote is opened that nothing closes: those after it are rows.
    """

    is_table = True
    is_by_suffix = False
    is_repeatable = True
    num_rows = None  # a field may have line breaks, so only reading tells

    def __init__(self, files: Sequence[File], max_bytes: int = MAX_CELL_BYTES) -> None:
        self._files = files

    def read(self, lines: Lines) -> Iterator[Row | BadItem]:
        """Yields the wanted rows, numbered through all files without their first lines."""
        line = 0
        for file in self._files:
            try:
                with open_content(file) as opened:
                    for row in self._rows(opened, file):
                        line += 1
                        if lines.is_past(line):
                            return
                        if lines.takes(line):
                            yield self._checked(row, line, file)
            except (OSError, csv.Error) as error:
                line += 1
                if lines.takes(line):
                    yield unreadable(file, line, error)

    def _rows(self, opened: BinaryIO, file: File) -> Iterator[dict[str, str] | _Fault]:
        """Yields {column: text}, or what is wrong with a row."""
        texts = _Lines(_texts(opened))
        is_tsv = suffix_of(unpacked_name(file.path), (".tsv",))
        mark = "\t" if is_tsv else _mark(texts.first())
        reader = csv.reader(texts, delimiter=mark)
        columns = next(reader, [])
        first = "".join(texts.taken)
        if "\0" in first or not is_utf8(first):
            raise csv.Error(f"its first line is {not_utf8(first)}")
        if not columns or len(set(columns)) < len(columns):
            raise csv.Error("its first line must name the columns, each once")
        num_undone = 0
        while True:
            texts.begin()
            try:
                fields, fault = next(reader), ""
            except StopIteration:
                return
            except csv.Error as error:
                fields, fault = [], str(error)
            if not fault and not texts.is_ended:
                if row := _row(columns, fields):
                    yield row
                continue
            first = "".join(texts.taken[:1]).partition(mark)[0].strip('"\r\n')
            yield _Fault(words=fault or UNCLOSED, values=_first(columns, [first]))
            # An open quote has swallowed the rows that follow: they are read again.
            if num_undone < MAX_UNDONE:
                num_undone += 1
                texts.undo()
                reader = csv.reader(texts, delimiter=mark)

    def _checked(self, row: dict[str, str] | _Fault, line: int, file: File) -> Row | BadItem:
        if isinstance(row, _Fault):
            words = f"the row cannot be used: {row.words}"
            return BadItem(line=line, message=words, values=row.values)
        whole = "".join(row.values())
        if not is_utf8(whole):
            return BadItem(line=line, message=f"the row is {not_utf8(whole)}")
        return table_row(line, {name: text or None for name, text in row.items()}, file.folder)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A row that cannot be used. words: why. values: the first column alone, since nothing says
    where the others begin."""

    words: str
    values: Mapping[str, str]


def _mark(first: str) -> str:
    """Returns what stands between the fields of a CSV file, by its first line: in countries with
    decimal commas spreadsheets write semicolons, and some programs write tabs."""
    return next((mark for mark in (",", ";", "\t") if mark in first), ",")


def _row(columns: Sequence[str], fields: Sequence[str]) -> dict[str, str] | _Fault | None:
    """Returns the values of a row; None for a blank line."""
    if not fields:
        return None
    if len(fields) == len(columns):
        return dict(zip(columns, fields, strict=True))
    words = f"it has {len(fields)} fields, the first line names {len(columns)} columns"
    return _Fault(words=words, values=_first(columns, fields))


def _first(columns: Sequence[str], fields: Sequence[str]) -> dict[str, str]:
    is_text = bool(fields) and fields[0].isprintable()
    return {columns[0]: fields[0]} if is_text else {}


class _Lines:
    """Lines of a file, of which those of the last row can be read again. taken: the lines of this
    row. is_ended: whether it wanted more than the file has."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts
        self._ahead: deque[str] = deque()
        self.begin()

    def first(self) -> str:
        """Returns the next line, which stays to be read; "" at the end."""
        text = next(self._texts, "")
        self._ahead.extend([text] if text else ())
        return text

    def begin(self) -> None:
        """Begins a row."""
        self.taken: list[str] = []
        self.is_ended = False

    def undo(self) -> None:
        """Gives back the lines of this row but the first."""
        self._ahead.extendleft(reversed(self.taken[1:]))

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        text = self._ahead.popleft() if self._ahead else next(self._texts, None)
        if text is None:
            self.is_ended = True
            raise StopIteration
        self.taken.append(text)
        return text


def _texts(file: BinaryIO) -> Iterator[str]:
    """Yields the lines as text; one without an end is cut into several, and of very many blank ones
    the first only."""
    data = file.readline(MAX_LINE_BYTES).removeprefix(codecs.BOM_UTF8)
    num_blank = 0
    while data:
        yield data.decode("utf-8", "surrogateescape")
        num_blank = num_blank + 1 if data in (b"\n", b"\r\n") else 0
        if num_blank > MAX_BLANK:
            skip_blank(file)
        data = file.readline(MAX_LINE_BYTES)
