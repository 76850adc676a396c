"""An output that is a table in CSV: `captions.csv` is written whole at the end of each run, from
the records in `captions.csv.jsonl` beside it, which a run extends and resumes as any file of lines.

A cell that a spreadsheet would compute, one that begins with =, +, -, @ (also in full width), a tab
or a return, has an apostrophe before it; the records have the exact text. A table with more than
ASCII begins with a byte order mark: without it, Excel does not know that it is UTF-8.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mmdeploy_llm.data.records.columns import Columns
from mmdeploy_llm.data.records.declared import plain_cells, plain_kinds
from mmdeploy_llm.data.records.files import open_regular
from mmdeploy_llm.data.records.record import FIELDS, Record
from mmdeploy_llm.data.records.unicode_text import without_surrogates

from .made import MadeSink

BEFORE = tuple(name for name, own in FIELDS.items() if own.csv == "first")
AFTER = tuple(name for name, own in FIELDS.items() if own.csv == "last")
OTHERS = tuple(name for name, own in FIELDS.items() if own.csv == "never")
FIRST, LAST = tuple(plain_kinds(FIELDS, BEFORE)), tuple(plain_kinds(FIELDS, AFTER))
ORDER = ("answers", "columns", "")  # of the other columns: where they come from
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
HEADER_BYTES = 2**16


class CsvSink(MadeSink):
    """A table, and the file of lines that it is made from; see Sink for the methods."""

    ending = ".jsonl"

    def is_ours(self) -> bool:
        """Returns whether the file is a table that a batch has written, by its first line."""
        with open_regular(self.made, os.O_RDONLY) as file:
            first = (file.read(HEADER_BYTES) or b"").removeprefix(codecs.BOM_UTF8)
        return first.startswith(",".join(FIRST).encode())

    def pieces(self) -> CsvTable:
        """Returns the lines of the table."""
        return CsvTable(lambda: (entry.record for entry in self.entries()))


class CsvTable:
    """The lines of the table of records, which are read twice: for the columns, then for the rows.
    num_guarded: cells that have an apostrophe before them, once all lines are read."""

    def __init__(self, records: Callable[[], Iterable[Record]]) -> None:
        self._records = records
        self.num_guarded = 0
        self._mark = b""

    def __iter__(self) -> Iterator[bytes]:
        columns = Columns(fixed=(*FIRST, *LAST), fields=(*BEFORE, *AFTER, *OTHERS))
        for values in self._values():
            columns.add(values)
        own = {
            source: [n for n, at, _ in columns.items() if at.source == source] for source in ORDER
        }
        names = (*FIRST, *own["answers"], *own["columns"], *LAST, *own[""])
        yield self._mark + _line(map(self._cell, names))
        for values in self._values():
            row = columns.cells(values) | plain_cells(FIELDS, (*BEFORE, *AFTER), values)
            yield _line(self._cell(row.get(name)) for name in names)

    def _values(self) -> Iterator[dict[str, Any]]:
        for record in self._records():
            line = record.to_json()
            if not line.isascii():
                self._mark = codecs.BOM_UTF8
            yield json.loads(line)

    def _cell(self, value: Any) -> str:
        """Returns a cell: lists and objects as JSON, nothing as an empty one."""
        if not isinstance(value, str):
            return "" if value is None else json.dumps(value, ensure_ascii=False)
        text = without_surrogates(value).replace("\0", "\ufffd")
        if not text.startswith(FORMULAS):
            return text
        self.num_guarded += 1
        return f"'{text}"


def _line(cells: Iterable[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue().encode()
