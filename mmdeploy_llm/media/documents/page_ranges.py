"""Page ranges as people write them: "1-5,8,-1"."""

from __future__ import annotations

import re

from mmdeploy_llm.errors import MediaError

PART = re.compile(r"\s*(-?\d{1,9})\s*(-\s*(-?\d{1,9})?)?\s*\Z")
HOW = 'write pages as "3", "1-5", "8-" (to the last), "-1" (the last) or several with commas'


def parse_pages(text: str, num_pages: int, *, is_strict: bool = True) -> tuple[int, ...]:
    """Returns the indexes, from 0, of the pages that a text names, in its order; a page that is
    named twice comes once.

    Pages count from 1, negative ones from the end. Raises MediaError for a text that is no range
    of any document, and for pages that this one does not have; unless `is_strict` these are left
    out.
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        match = PART.match(part)
        if match is None:
            raise MediaError(f"pages {text[:80]!r}: {part[:40]!r} is no range; {HOW}")
        _check_written(part.strip()[:40], int(match[1]), int(match[3] or match[1]))
        first = _page(match[1], num_pages)
        last = first if match[2] is None else _page(match[3] or "-1", num_pages)
        if is_strict:
            _check(part.strip()[:40], (match[1], first), (match[3], last), num_pages)
        found.update(dict.fromkeys(range(max(first, 1) - 1, min(last, num_pages))))
    return tuple(found)


def _page(number: str, num_pages: int) -> int:
    """Returns a page counted from 1, which need not exist."""
    own = int(number)
    return num_pages + 1 + own if own < 0 else own


def _check_written(part: str, first: int, last: int) -> None:
    """Raises MediaError for a range that names page 0, or ends before it begins in any document."""
    if first == 0 or last == 0:
        raise MediaError(f"pages {part!r}: there is no page 0; pages count from 1")
    if (first < 0) == (last < 0) and last < first:
        raise MediaError(f"pages {part!r} end before they begin")


def _check(part: str, first: tuple[str, int], last: tuple[str | None, int], num_pages: int) -> None:
    """Raises MediaError for a range with pages that do not exist, and for one that ends before it
    begins."""
    for written, page in (first, last):
        if not 1 <= page <= num_pages:
            has = f"{num_pages} page" if num_pages == 1 else f"{num_pages} pages"
            own = written if written is not None else str(num_pages)
            raise MediaError(f"page {own} of {part!r} does not exist; the document has {has}")
    if last[1] < first[1]:
        raise MediaError(f"pages {part!r} end before they begin")
