"""Page ranges as people write them: "1-5,8,-1"."""

from __future__ import annotations

import re

from mmdeploy_llm.errors import MediaError

PART = re.compile(r"\s*(?:(-?\d{1,9})\s*(?:-\s*(-?\d{1,9})?)?|-\s*)\s*\Z")
HOW = 'write pages as "3", "1-5", "8-" (to the last), "-1" (the last) or several with commas'


def parse_pages(text: str, num_pages: int) -> tuple[int, ...]:
    """Returns the indexes, from 0, of the pages that a text names, in its order; a page that is
    named twice comes once.

    Pages count from 1, negative ones from the end. Raises MediaError for a text that is no range,
    and for pages that the document does not have.
    """
    found: dict[int, None] = {}
    for part in text.split(","):
        match = PART.match(part)
        if match is None or match[1] is None:
            raise MediaError(f"pages {text[:80]!r}: {part[:40]!r} is no range; {HOW}")
        first = _page(match[1], part, num_pages)
        is_range = "-" in part.strip()[len(match[1]) :]
        last = first
        if is_range:
            last = num_pages if match[2] is None else _page(match[2], part, num_pages)
        if last < first:
            raise MediaError(f"pages {text[:80]!r}: {part.strip()[:40]!r} ends before it begins")
        found.update(dict.fromkeys(range(first - 1, last)))
    return tuple(found)


def _page(number: str, part: str, num_pages: int) -> int:
    """Returns a page counted from 1. Raises MediaError for one that does not exist."""
    own = int(number)
    page = num_pages + 1 + own if own < 0 else own
    if own == 0 or not 1 <= page <= num_pages:
        has = f"{num_pages} page" if num_pages == 1 else f"{num_pages} pages"
        named = part.strip()[:40]
        raise MediaError(f"page {own} of {named!r} does not exist; the document has {has}")
    return page
