"""Keeps the place of a reader of tables: what it has read, what it reads now, and how it goes on
after a loss."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from mmdeploy_llm.data.rows.files import File
from mmdeploy_llm.data.rows.lines import unreadable
from mmdeploy_llm.data.rows.rows import MAX_SHOWN, BadItem, Lines

ROWS_AT_ONCE, BYTES_AT_ONCE = 256, 16 * 2**20  # converted to Python, and sent, at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A row that is read next.

    file, group: numbers from 0; a group is a row group of Parquet or a batch of Arrow. row: its
    number in the group. line: its number in the corpus, from 1.
    """

    file: int = 0
    group: int = 0
    row: int = 0
    line: int = 1

    @property
    def unit(self) -> tuple[int, int]:
        """The group of a file, which is lost as a whole."""
        return self.file, self.group

    def numbers(self) -> tuple[int, ...]:
        """Returns the place as a list of numbers for a message."""
        return self.file, self.group, self.row, self.line

    @staticmethod
    def of(numbers: Sequence[int]) -> Place:
        """Returns the place that `numbers` has returned."""
        file, group, row, line = map(int, numbers)
        return Place(file=file, group=group, row=row, line=line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Some rows of a table, in order.

    lines: numbers of the good rows, columns: their values. faults: the bad rows. now: what is read
    next. lost: where to go on when that cannot be read. name: what is lost then, for a message.
    """

    lines: Sequence[int] = ()
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    faults: Sequence[BadItem] = ()
    now: Place
    lost: Place
    name: str


@dataclass(slots=True, kw_only=True)
class Cursor:
    """The place of a reader. Moved by the reader that it is given to.

    careful: the unit that is read one row at a time. bound: called with the bytes of what is read
    next, before it is read. size: rows that are converted at once, adapted to what they take.
    """

    lines: Lines
    now: Place = field(default_factory=Place)
    careful: tuple[int, int] | None = None
    bound: Callable[[int], object] = int
    lost: Place = field(default_factory=Place)
    name: str = ""
    size: int = 1

    @property
    def is_past(self) -> bool:
        """Whether neither this row nor any later one is wanted."""
        return self.lines.is_past(self.now.line)

    @property
    def is_careful(self) -> bool:
        """Whether the unit that is read now has failed before, all rows at once."""
        return self.careful == self.now.unit

    def enter(self, name: str, *, lost: Place, group: int | None = None) -> Piece:
        """Goes to a file or group, before anything of it is read. group: None stays in this one."""
        if group not in (None, self.now.group):
            self.now = replace(self.now, group=group, row=0)
        self.lost, self.name = lost, name
        return self._piece()

    def took(
        self,
        num_rows: int,
        lines: Sequence[int],
        columns: Mapping[str, Sequence[Any]],
        faults: Sequence[BadItem],
    ) -> Piece:
        """Goes on by some rows."""
        here = self.now
        self.now = replace(here, row=here.row + num_rows, line=here.line + num_rows)
        return replace(self._piece(faults), lines=lines, columns=columns)

    def lose(self, reason: object) -> Piece:
        """Gives up what is left of the file or group: one error, however many rows it claims."""
        bad = lost_item(self.name, self.now, self.lost, str(reason))
        faults = (bad,) if self.lines.takes(bad.line) else ()
        self.now = after(self.now, self.lost)
        return self._piece(faults)

    def fit(self, num_rows: int, num_bytes: int) -> None:
        """Adapts how many rows are converted at once to what the last ones took."""
        fits = BYTES_AT_ONCE * num_rows // max(num_bytes, 1)
        self.size = max(1, min(ROWS_AT_ONCE, fits, 2 * self.size))

    def _piece(self, faults: Sequence[BadItem] = ()) -> Piece:
        return Piece(faults=faults, now=self.now, lost=self.lost, name=self.name)


def after(now: Place, lost: Place) -> Place:
    """Returns where to go on after a loss, whose error has the number of a line in any case."""
    return lost if lost.line > now.line else replace(lost, line=now.line + 1)


def lost_item(name: str, now: Place, lost: Place, reason: str) -> BadItem:
    """Returns the error that stands for all rows from `now` up to `lost`."""
    many = lost.line - now.line
    rows = f", rows {now.line} to {lost.line - 1}," if many > 1 else ""
    message = f"{name!r}{rows} cannot be read: {reason[:MAX_SHOWN]}"
    return BadItem(line=now.line, id=name, message=message)


class Table(Protocol):
    """A reader of tables, which runs in the child.

    num_rows: the number of all rows, None when it is known only after reading them.
    """

    num_rows: int | None

    def pieces(self, cursor: Cursor) -> Iterable[Piece]:
        """Yields the wanted rows from the cursor's place on. Says where it goes before it reads
        there, so that a death is one of that place."""


REMOTE_BYTES = 2**33  # of a file that is elsewhere, whose size is not asked for


def size_of(file: File) -> int:
    """Returns the size of a file in bytes. Raises OSError when it is gone."""
    return REMOTE_BYTES if file.is_remote else os.path.getsize(file.path)


def enter_file(cursor: Cursor, number: int, file: File) -> Piece:
    """Goes to a file, before it is opened."""
    here = cursor.now
    if here.file != number:
        cursor.now = Place(file=number, line=here.line)
    return cursor.enter(file.name, lost=Place(file=number + 1, line=here.line + 1))


def lose_file(cursor: Cursor, file: File, error: Exception | str) -> Piece:
    """Gives up what is left of a file: one error."""
    bad = unreadable(file, cursor.now.line, error)
    now = Place(file=cursor.now.file + 1, line=bad.line + 1)
    piece = cursor.enter(file.name, lost=now)
    cursor.now = now
    is_wanted = cursor.lines.takes(bad.line)
    return replace(piece, now=now, faults=(bad,) if is_wanted else ())
