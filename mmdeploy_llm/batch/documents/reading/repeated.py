"""Finds lines that stand at the top or the foot of many pages of a document, and marks them.

    page 1   ACME Report        <- the first one stays
    page 2   ACME Report        <- becomes <!-- page header: ACME Report -->
    page 3   ACME Report

A line counts as running when it is among the first (or last) EDGE lines of at least FEWEST pages,
and of half of the pages of the document at least. Numbers in it are the same on all of these pages,
or count them: "Page 3 of 9". Long lines, tables, code, formulas and pictures are never running.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .markup.blocks import comment

EDGE = 2  # lines at the top, and as many at the foot
FEWEST = 3  # pages
MAX_LINE = 120  # characters
NUMBER = re.compile(r"\d{1,9}")
NEVER = re.compile(r"\s*(?:\||<|```|~~~|\$\$|!\[|-{3,}\s*$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """The pages of a document. num_marked: lines that are comments now."""

    pages: tuple[str, ...]
    num_marked: int


def mark_running(pages: Sequence[str], numbers: Sequence[int] | None = None) -> Marked:
    """Marks running headers and footers from their second page on; nothing is left out. numbers:
    of the pages; None: 1, 2, 3."""
    lines = [page.split("\n") for page in pages]
    own = range(1, len(pages) + 1) if numbers is None else numbers
    fewest = max(FEWEST, (len(pages) + 1) // 2)
    num_marked = 0
    for noun, is_top in (("header", True), ("footer", False)):
        found: dict[str, list[tuple[int, int]]] = {}
        for page, places in enumerate([_edge(each, is_top=is_top) for each in lines]):
            for key, line in {_key(lines[page][line]): line for line in places}.items():
                found.setdefault(key, []).append((page, line))
        for group in found.values():
            running = _counting([(own[page], lines[page][line]) for page, line in group])
            kept = [place for place, is_kept in zip(group, running, strict=True) if is_kept]
            if len(kept) < fewest:
                continue
            for page, line in kept[1:]:
                lines[page][line] = comment(f"page {noun}: {lines[page][line].strip()}")
                num_marked += 1
    return Marked(pages=tuple("\n".join(each) for each in lines), num_marked=num_marked)


def _counting(group: Sequence[tuple[int, str]]) -> list[bool]:
    """Returns of lines that differ in their numbers alone, with the numbers of their pages, which
    have at every place the usual number or the one that counts pages."""
    values = [[int(number) for number in NUMBER.findall(line)] for _, line in group]
    usual = [Counter(column).most_common(1)[0][0] for column in zip(*values, strict=True)]
    offsets = [
        Counter(value - page for value, (page, _) in zip(column, group, strict=True))
        for column in zip(*values, strict=True)
    ]
    shift = [counts.most_common(1)[0][0] for counts in offsets]
    return [
        all(value in (same, page + by) for value, same, by in zip(row, usual, shift, strict=True))
        for row, (page, _) in zip(values, group, strict=True)
    ]


def _edge(lines: Sequence[str], *, is_top: bool) -> list[int]:
    """Returns the places of the first or last lines with text that may be running, never of half of
    a page or more."""
    full = [place for place, line in enumerate(lines) if line.strip()]
    most = min(EDGE, max(0, (len(full) - 1) // 2) or (len(full) > 1))
    edge = full[:most] if is_top else full[len(full) - most :]
    return [
        place for place in edge if len(lines[place]) <= MAX_LINE and not NEVER.match(lines[place])
    ]


def _key(line: str) -> str:
    """Returns what is alike in a line on all pages."""
    return NUMBER.sub("#", " ".join(line.split()).casefold())
