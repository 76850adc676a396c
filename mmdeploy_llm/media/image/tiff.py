"""The pages of a TIFF file, from the numbers in its directories alone: no pixel is decoded.

    header      byte order, 42 (43: BigTIFF), place of the first directory
    directory   number of entries, entries (tag, type, count, value), place of the next one or 0

A directory that says that it is a preview or a mask (tags 254 and 255) is no page. Source: TIFF
6.0, sections 2 and 8; the design of BigTIFF.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["first_directory", "pages_of", "with_first"]

SUBFILE_TYPE, OLD_SUBFILE_TYPE = 254, 255
PREVIEW, MASK = 0b001, 0b100  # bits of SUBFILE_TYPE
OLD_PREVIEW = 2
FORMS = {3: "H", 16: "Q"}  # of values by their types; others have 4 bytes
NUM_LOOKED_AT = 4  # entries, which are sorted by their tags
MAX_DIRECTORIES = 200_000  # which are read; a longer list counts as damaged

# Returns the bytes of a file from a place on; fewer, or EOFError, at its end.
Read = Callable[[int, int], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The forms of numbers: of the count of a directory and of a place; bytes of an entry, and the
    place of the first directory's place in the header."""

    order: str
    count: str
    place: str
    entry_size: int
    header_size: int

    def number(self, read: Read, form: str, place: int) -> int:
        """Returns the number at a place. Raises EOFError past the end of the file."""
        size = struct.calcsize(self.order + form)
        data = read(place, size)
        if len(data) < size:
            raise EOFError
        (found,) = struct.unpack(self.order + form, data)
        return int(found)


def _layout(head: bytes) -> _Layout | None:
    order = {b"II": "<", b"MM": ">"}.get(head[:2])
    if order is None:
        return None
    if head[2:4] in (b"+\0", b"\0+"):
        return _Layout(order=order, count="Q", place="Q", entry_size=20, header_size=8)
    return _Layout(order=order, count="H", place="I", entry_size=12, header_size=4)


def first_directory(read: Read) -> int:
    """Returns the place of the first directory. Raises EOFError for what is no TIFF."""
    layout = _layout(read(0, 4))
    if layout is None:
        raise EOFError
    return layout.number(read, layout.place, layout.header_size)


def pages_of(read: Read) -> Iterator[int | None]:
    """Yields the place of each page's directory, in order; None at the end where the list of them
    is damaged: it leads out of the file or in a circle. A file of previews alone has one page, the
    first. Raises EOFError as first_directory does."""
    layout = _layout(read(0, 4))
    place = first = first_directory(read)
    assert layout is not None, "it has a first directory"
    met, num_pages = set[int](), 0
    while place and place not in met and len(met) < MAX_DIRECTORIES:
        met.add(place)
        try:
            count = layout.number(read, layout.count, place)
            start = place + struct.calcsize(layout.order + layout.count)
            is_page = not _is_beside(read, layout, start, count)
            after = layout.number(read, layout.place, start + count * layout.entry_size)
        except (EOFError, OverflowError):
            break
        if is_page:
            num_pages += 1
            yield place
        place = after
    if not num_pages:
        yield first
    if place and (num_pages or place != first):
        yield None


def _is_beside(read: Read, layout: _Layout, start: int, count: int) -> bool:
    """Returns whether a directory is of a preview or a mask."""
    for number in range(min(count, NUM_LOOKED_AT)):
        entry = start + number * layout.entry_size
        tag, form = (layout.number(read, "H", entry + by) for by in (0, 2))
        if tag in (SUBFILE_TYPE, OLD_SUBFILE_TYPE):
            at = entry + layout.entry_size - (8 if layout.place == "Q" else 4)
            value = layout.number(read, FORMS.get(form, "I"), at)
            return (
                value == OLD_PREVIEW if tag == OLD_SUBFILE_TYPE else bool(value & (PREVIEW | MASK))
            )
    return False


def with_first(blob: bytes, place: int) -> bytes:
    """Returns a file whose first directory is the one at a place: its first picture."""
    layout = _layout(blob[:4])
    assert layout is not None, "it has directories"
    written = struct.pack(layout.order + layout.place, place)
    return blob[: layout.header_size] + written + blob[layout.header_size + len(written) :]
