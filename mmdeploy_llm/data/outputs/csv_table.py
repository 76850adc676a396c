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
from pathlib import Path
from typing import Any, Self

from mmdeploy_llm.data.records.columns import Columns
from mmdeploy_llm.data.records.declared import plain_cells, plain_kinds
from mmdeploy_llm.data.records.files import Folder, check_regular, open_regular
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import FIELDS, Record
from mmdeploy_llm.data.records.unicode_text import without_surrogates
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError

from .base import RecordSink
from .jsonl import JsonlSink
from .ours import foreign
from .scan import Entry, Kept, Mode, PlaceOf, exists_already

BEFORE = tuple(name for name, own in FIELDS.items() if own.csv == "first")
AFTER = tuple(name for name, own in FIELDS.items() if own.csv == "last")
OTHERS = tuple(name for name, own in FIELDS.items() if own.csv == "never")
FIRST, LAST = tuple(plain_kinds(FIELDS, BEFORE)), tuple(plain_kinds(FIELDS, AFTER))
ORDER = ("answers", "columns", "")  # of the other columns: where they come from
FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
HEADER_BYTES = 2**16


class CsvSink(JsonlSink):
    """A table, and the file of lines that it is made from; see Sink for the methods."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.with_name(f"{path.name}.jsonl"))
        self._table = path
        self.name = str(path)

    @property
    def places(self) -> tuple[Path, ...]:
        """The table, the file of lines, and those beside it."""
        return (self._table, self._table.with_name(f"{self._table.name}.partial"), *super().places)

    def check(self, mode: Mode) -> None:
        """Raises ConfigError when the table or the lines cannot be written in this mode."""
        if check_regular(self._table):
            if mode == "new":
                raise ConfigError(exists_already(self._table))
            if not is_table(self._table):
                raise ConfigError(foreign(self._table))
            if mode == "resume" and not self._path.exists():
                raise ConfigError(
                    f"{str(self._table)!r} is made from {str(self._path)!r}, which is missing: "
                    "put it there, or --overwrite starts again"
                )
        super().check(mode)

    def exists(self) -> bool:
        """Returns whether the table and its lines are there."""
        return self._table.exists() and super().exists()

    def writer(self, mode: Mode, kept: Kept) -> CsvWriter:
        """Locks the lines and removes what must not stay in them."""
        return CsvWriter(self._table, super().writer(mode, kept), self.entries)


class CsvWriter:
    """Writes lines, and the table at the end; see RecordSink for the methods."""

    def __init__(
        self, table: Path, lines: RecordSink, entries: Callable[[], Iterator[Entry]]
    ) -> None:
        self._table, self._lines, self._entries = table, lines, entries
        self.index, self.num_again = lines.index, lines.num_again

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Adds a line."""
        is_first = self._lines.write(record, place, item)
        self.num_again = self._lines.num_again
        return is_first

    def check(self) -> None:
        """Raises OutputLostError when somebody else changed the lines."""
        self._lines.check()

    def finish(self, place_of: PlaceOf) -> None:
        """Completes the lines and writes the table from them."""
        self._lines.finish(place_of)
        self.index = self._lines.index
        with Folder.open(self._table.parent) as folder:
            folder.write(self._table.name, self._lines_of_table())

    def _lines_of_table(self) -> CsvTable:
        return CsvTable(lambda: (entry.record for entry in self._entries()))

    def close(self) -> None:
        """Releases the lock."""
        self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def is_table(path: Path) -> bool:
    """Whether a file is a table that a batch has written, by its first line."""
    with open_regular(path, os.O_RDONLY) as file:
        first = (file.read(HEADER_BYTES) or b"").removeprefix(codecs.BOM_UTF8)
        return first.startswith(",".join(FIRST).encode())
