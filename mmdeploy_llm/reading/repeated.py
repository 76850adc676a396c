"""Finds lines that stand at the top or the foot of many pages of a document, and marks them.

    page 1   ACME Report        <- the first one stays
    page 2   ACME Report        <- becomes <!-- page header: ACME Report -->
    page 3   ACME Report

A line counts as running when it is among the first (or last) EDGE lines of at least FEWEST pages,
and of half of the pages of the document at least, where numbers do not count: "Page 3 of 9". Long
lines, headings of other texts, cells of tables, code and formulas are never running.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .markup.blocks import comment

EDGE = 2  # lines at the top, and as many at the foot
FEWEST = 3  # pages
MAX_LINE = 120  # characters
NUMBER = re.compile(r"\d+|\b[ivxlcdm]+\b", re.IGNORECASE)
NEVER = re.compile(r"\s*(?:\||<|```|~~~|\$\$|!\[|-{3,}\s*$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Marked:
    """The pages of a document. num_marked: lines that are comments now."""

    pages: tuple[str, ...]
    num_marked: int


def mark_running(pages: Sequence[str]) -> Marked:
    """Marks running headers and footers from their second page on; nothing is left out."""
    lines = [page.split("\n") for page in pages]
    num_marked = 0
    for noun, is_top in (("header", True), ("footer", False)):
        at = [_edge(own, is_top=is_top) for own in lines]
        found: dict[str, list[tuple[int, int]]] = {}
        for page, places in enumerate(at):
            for key, line in {_key(lines[page][line]): line for line in places}.items():
                found.setdefault(key, []).append((page, line))
        for places in found.values():
            if len(places) < max(FEWEST, (len(pages) + 1) // 2):
                continue
            for page, line in places[1:]:
                lines[page][line] = comment(f"page {noun}: {lines[page][line].strip()}")
                num_marked += 1
    return Marked(pages=tuple("\n".join(own) for own in lines), num_marked=num_marked)


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
