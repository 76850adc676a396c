"""Joins tables that go over pages, in the Markdown of a document.

    page 3   text, a table to the foot   ->  the table with the rows of both pages; <!-- page 4 -->
    page 4   a table at the top, text        stands before the first row of page 4

Nothing but comments and the number of a page may stand between the two parts, which are written
alike and have as many columns. The second part goes on if it begins with the header of the first,
which is left out then, or has none of its own. Markdown wants a header of every table: there the
first row of the second part is one of the table if it has numbers where the first part has numbers
under a header without one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .markup.blocks import comment
from .markup.tables import PIPES, TABLE, Table, read_html, read_pipes

BESIDE = re.compile(r"\s+|<!--.*?-->", re.DOTALL)
PAGE_NUMBER = re.compile(
    r"[^\w\n|<]*(?:page[^\S\n]*)?\d{1,4}(?:[^\S\n]*(?:/|of)[^\S\n]*\d{1,4})?[^\w\n|]*$",
    re.IGNORECASE | re.MULTILINE,
)
ROW = re.compile(r"<tr\b.*?</tr\s*>", re.DOTALL | re.IGNORECASE)
END = re.compile(r"(?:\s*</tbody\s*>)?\s*</table\s*>\Z", re.IGNORECASE)
NUMBER = re.compile(r"\W*\d[\d.,\s]*\W*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The pages of a document. num_joined: parts of tables that stand on the page of their first
    part now."""

    pages: tuple[str, ...]
    num_joined: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A table in the Markdown of a page, between `begin` and `end`. written: its text."""

    begin: int
    end: int
    written: str
    table: Table

    @property
    def is_html(self) -> bool:
        return self.written.startswith("<")


def join_tables(pages: Sequence[str], numbers: Sequence[int]) -> Joined:
    """Joins tables over pages. pages: Markdown, "" of one that could not be read. numbers: of the
    pages."""
    texts, num_joined = list(pages), 0
    holder: int | None = None  # the page whose table may go on
    for place, text in enumerate(texts):
        is_next = place > 0 and numbers[place] == numbers[place - 1] + 1
        first = _last_part(texts[holder]) if is_next and holder is not None else None
        second = _first_part(text)
        lines = None if first is None or second is None else _rows_to_add(first, second)
        if lines is None or first is None or second is None or holder is None:
            holder = place
            continue
        whole = _with_rows(first, lines, numbers[place])
        own = texts[holder]
        texts[holder] = own[: first.begin] + whole + own[first.end :]
        mark = comment(f"the rows of a table stand on page {numbers[holder]}")
        texts[place] = text[: second.begin] + mark + text[second.end :]
        num_joined += 1
        if _after_beside(texts[place], second.begin) < len(texts[place]):
            holder = place  # other text follows
    return Joined(pages=tuple(texts), num_joined=num_joined)


def _first_part(text: str) -> _Part | None:
    """Returns the table that a page begins with."""
    begin = _after_beside(text, 0)
    for pattern in (TABLE, PIPES):
        match = pattern.match(text, begin)
        if match is not None:
            return _part(match)
    return None


def _after_beside(text: str, at: int) -> int:
    """Returns the place after comments and numbers of pages that stand in a text from `at` on."""
    while at < len(text):
        match = BESIDE.match(text, at)
        if match is None and not text[text.rfind("\n", 0, at) + 1 : at].strip():
            match = PAGE_NUMBER.match(text, at)
        if match is None or match.end() == at:
            break
        at = match.end()
    return at


def _last_part(text: str) -> _Part | None:
    """Returns the table that a page ends with."""
    for pattern in (TABLE, PIPES):
        *_, match = (None, *pattern.finditer(text))
        if match is not None and _after_beside(text, match.end()) == len(text):
            return _part(match)
    return None


def _part(match: re.Match[str]) -> _Part | None:
    written = match[0]
    try:
        table = read_html(written) if written.startswith("<") else read_pipes(written)
        table.grid()
    except ValueError:
        return None
    return _Part(begin=match.start(), end=match.end(), written=written, table=table)


def _rows_to_add(first: _Part, second: _Part) -> list[str] | None:
    """Returns the rows of the second part as they are written, None if it is another table."""
    if first.is_html != second.is_html:
        return None
    above, below = ([*map(_folded, part.table.grid())] for part in (first, second))
    if len(above[0]) != len(below[0]):
        return None
    rows = ROW.findall(second.written)
    if not second.is_html:
        head, _, *rest = second.written.strip("\n").splitlines()
        rows = [head, *rest]
    if len(rows) != len(below):
        return None
    if above[0] == below[0] or not any(below[0]):
        return rows[1:] or None
    if second.is_html:
        return None if any(cell.is_header for cell in second.table.rows[0]) else rows
    return rows if _is_row_of(below[0], above) else None


def _folded(row: Sequence[str]) -> list[str]:
    return [" ".join(text.split()).casefold() for text in row]


def _is_row_of(row: Sequence[str], table: Sequence[Sequence[str]]) -> bool:
    """Returns whether numbers stand in a row where a table has them under a header without one."""
    head, *body = table
    of_numbers = [
        column
        for column, name in enumerate(head)
        if body
        and not NUMBER.fullmatch(name)
        and all(NUMBER.fullmatch(own[column]) for own in body)
    ]
    return bool(of_numbers) and all(NUMBER.fullmatch(row[column]) for column in of_numbers)


def _with_rows(first: _Part, rows: Sequence[str], number: int) -> str:
    """Returns a table with more rows at its end. number: of the page that they are from."""
    mark = comment(f"page {number}")
    if first.is_html:
        match = END.search(first.written)
        end = len(first.written) if match is None else match.start()
        return "\n".join([first.written[:end], mark, *rows]) + first.written[end:]
    head, *rest = rows
    marked = f"| {mark} {head.strip().removeprefix('|').lstrip()}"
    return "\n".join([first.written.rstrip("\n"), marked, *rest])
