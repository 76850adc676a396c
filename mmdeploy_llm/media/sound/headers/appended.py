"""Takes apart files that were written one after the other into one, as `cat a.wav b.wav` does:
FFmpeg reads the first alone where a header says how long the file is.

    RIFF size WAVE ... | RIFF size WAVE ...       also RF64, AIFF and W64
    ftyp mdat moov     | ftyp mdat moov           MP4, M4A, MOV
    FLV 1 header tags  | FLV 1 header tags
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from .chunks import DS64, LARGE, LAYOUTS, chunk, is_known

W64 = b"riff"
FLV, FLV_TAG, FLV_SIZE = b"FLV\x01", 11, 4  # bytes of a tag's header, and of the size after it


def files_in(blob: bytes, name: str) -> Sequence[bytes]:
    """Returns the files of which a file is made, in order; itself alone where it is one. name:
    FFmpeg's of its format."""
    find = {"wav": _chunks, "w64": _chunks, "aiff": _chunks, "mp4": _boxes, "flv": _tags}.get(name)
    begins = [] if find is None else [*find(blob)]
    if len(begins) < 2:
        return (blob,)
    return [blob[one:two] for one, two in pairwise((*begins, len(blob)))]


def _chunks(blob: bytes) -> Iterator[int]:
    """Yields where files that are lists of chunks begin: each says its size."""
    at = 0
    while at < len(blob):
        yield at
        head = blob[at : at + 16]
        size = _size(blob, at, head)
        if size is None:
            return
        align = LAYOUTS[head[:4]].align
        at += -(-size // align) * align
        following = blob[at : at + 16]
        is_kind = following[:4] == head[:4] or {head[:4], following[:4]} <= {b"RIFF", *LARGE}
        kind = slice(16) if head[:4] == W64 else slice(8, 12)
        if not is_kind or following[kind] != head[kind]:
            return


def _size(blob: bytes, at: int, head: bytes) -> int | None:
    """Returns the bytes that a file of chunks says it has; None where it does not know."""
    if head[:4] not in LAYOUTS:
        return None
    if head[:4] == W64:
        size = int.from_bytes(blob[at + 16 : at + 24], "little")
        return size if 24 <= size < len(blob) - at else None
    if head[:4] in LARGE:
        sizes = chunk(blob[at:], DS64, LAYOUTS[head[:4]])
        place = None if sizes is None else at + sizes.place
        size = 0 if place is None else int.from_bytes(blob[place : place + 8], "little")
    else:
        size = int.from_bytes(head[4:8], LAYOUTS[head[:4]].order)
    return 8 + size if is_known(size) and 8 + size < len(blob) - at else None


def _boxes(blob: bytes) -> Iterator[int]:
    """Yields where films begin: each has an index of its own, the box moov."""
    places = [own for own in _names_of_boxes(blob) if own[1] in (b"ftyp", b"moov")]
    last = max((at for at, name in places if name == b"moov"), default=0)
    yield 0
    has_index = False
    for at, name in places:
        if name == b"moov":
            has_index = True
        elif has_index and at < last:
            yield at
            has_index = False


def _names_of_boxes(blob: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 8 <= len(blob):
        size, name = int.from_bytes(blob[at : at + 4], "big"), blob[at + 4 : at + 8]
        yield at, name
        if size == 1:
            size = int.from_bytes(blob[at + 8 : at + 16], "big")
        if size < 8:
            return
        at += size


def _tags(blob: bytes) -> Iterator[int]:
    """Yields where files of FLV begin, which are lists of tags."""
    at = 0
    while at < len(blob):
        if blob.startswith(FLV, at):
            yield at
            size = int.from_bytes(blob[at + 5 : at + 9], "big") + FLV_SIZE
        else:
            size = FLV_TAG + int.from_bytes(blob[at + 1 : at + 4], "big") + FLV_SIZE
        at += size
