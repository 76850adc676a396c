"""Reads CSV and TSV files, whose first line names the columns. Media are paths in a column."""

from __future__ import annotations

import codecs
import csv
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from .files import File, suffix_of
from .lines import skip_blank, unreadable
from .packed import open_content, unpacked_name
from .rows import MAX_CELL_BYTES, BadItem, Lines, Row, table_row

MAX_LINE_BYTES = 2**20  # of one line of text; csv itself allows 128 KiB in one field
MAX_BLANK = 2**18  # blank lines in a row that are handed to csv: more do not fit into one field


class DelimitedRows:
    """The rows of CSV and TSV files. Every value is a text; an empty one counts as not given.

    A row that has more or fewer fields than there are columns, or is not UTF-8, becomes a BadItem.
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

    def _rows(self, opened: BinaryIO, file: File) -> Iterator[dict[str, str] | str]:
        """Yields {column: text}, or what is wrong with a row."""
        mark = "\t" if suffix_of(unpacked_name(file.path), (".tsv",)) else ","
        reader = csv.reader(_texts(opened), delimiter=mark)
        columns = next(reader, [])
        if not columns or len(set(columns)) < len(columns):
            raise csv.Error("its first line must name the columns, each once")
        while True:
            try:
                fields = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                yield str(error)
                continue
            if fields and len(fields) != len(columns):
                yield f"it has {len(fields)} fields, the first line names {len(columns)} columns"
            elif fields:
                yield dict(zip(columns, fields, strict=True))

    def _checked(self, row: dict[str, str] | str, line: int, file: File) -> Row | BadItem:
        if isinstance(row, str):
            return BadItem(line=line, message=f"the row cannot be used: {row}")
        try:
            "".join(row.values()).encode()
        except UnicodeEncodeError:  # `surrogateescape` has kept what is not UTF-8
            return BadItem(line=line, message="the row is not UTF-8")
        return table_row(line, {name: text or None for name, text in row.items()}, file.folder)


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
