"""Says whether a HEIF or AVIF file has several pictures, from its boxes: no pixel is decoded.

    ftyp  meta( pitm  iinf( infe ... )  iref( thmb auxl dimg ... ) )  [moov: a sequence]

A picture is an item of a coded or derived type that is not hidden, and is neither the thumbnail, an
auxiliary picture (depth, alpha) nor a tile of another one. Source: ISO/IEC 23008-12, sections 6 and
7; ISO/IEC 14496-12, 8.11.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

MAX_BOXES = 10_000  # of a file
MAX_META = 2**22  # bytes of the box that lists the items
PICTURES = frozenset(b"hvc1 hev1 lhv1 av01 avc1 jpeg j2k1 unci vvc1 grid iden iovl tmap".split())
OF_ANOTHER = frozenset((b"thmb", b"auxl"))  # from such an item to the picture it belongs to
Read = Callable[[int, int], bytes]  # place, size; raises EOFError past the end


@dataclass(frozen=True, slots=True, kw_only=True)
class _Box:
    kind: bytes
    content: bytes


def has_several(read: Read, size: int) -> bool:
    """Returns whether a file of `size` bytes has several pictures, or is a sequence. Raises
    EOFError for a file that is cut off."""
    place = 0
    for _ in range(MAX_BOXES):
        if place + 8 > size:
            return False
        head = read(place, 8)
        length, kind, begin = int.from_bytes(head[:4], "big"), head[4:], place + 8
        if length == 1:
            length, begin = int.from_bytes(read(begin, 8), "big"), begin + 8
        end = size if length == 0 else place + length
        if end < begin or end > size:
            return False
        if kind == b"moov":
            return True
        is_list = kind == b"meta" and end - begin <= MAX_META
        if is_list and _num_pictures(read(begin, end - begin)) > 1:
            return True
        place = end
    return False


def _num_pictures(meta: bytes) -> int:
    pictures: set[int] = set()
    others: set[int] = set()
    for box in _boxes(meta[4:]):  # after its version and flags
        if box.kind == b"iinf":
            skipped = 6 if box.content[:1] == b"\0" else 8
            pictures |= {own for each in _boxes(box.content[skipped:]) for own in _picture(each)}
        elif box.kind == b"iref":
            width = 2 if box.content[:1] == b"\0" else 4
            for each in _boxes(box.content[4:]):
                others |= _of_another(each, width)
    return len(pictures - others)


def _picture(box: _Box) -> Iterator[int]:
    """Yields the id of an item that is a picture, from version 2 of its entry on."""
    data = box.content
    width = {2: 2, 3: 4}.get(data[0] if data else 0)
    if box.kind != b"infe" or width is None or data[3] & 1:  # hidden
        return
    kind = data[4 + width + 2 : 8 + width + 2]
    if kind in PICTURES:
        yield int.from_bytes(data[4 : 4 + width], "big")


def _of_another(box: _Box, width: int) -> set[int]:
    """Returns the ids of items that are parts of another picture. width: bytes of an id."""
    data = box.content
    if box.kind in OF_ANOTHER:
        return {int.from_bytes(data[:width], "big")}
    if box.kind != b"dimg":
        return set()
    places = range(width + 2, len(data) - width + 1, width)
    return {int.from_bytes(data[place : place + width], "big") for place in places}


def _boxes(data: bytes) -> Iterator[_Box]:
    place = 0
    while place + 8 <= len(data):
        length = int.from_bytes(data[place : place + 4], "big")
        if length < 8 or place + length > len(data):
            return
        yield _Box(kind=data[place + 4 : place + 8], content=data[place + 8 : place + length])
        place += length
