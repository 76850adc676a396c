"""Corrects headers that say less than there is: a recorder that lost power, or ran beyond what its
program expected, has not written the size of its samples.

WAV, RF64, W64, AIFF and CAF are lists of chunks, of which one holds the samples. Where what follows
it is no chunk, it is sound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

MAX_CHUNKS = 1000
# Sizes that programs write which do not know it, since they write to a pipe: nearly 2 or 4 GiB.
UNKNOWN = (range(2**31 - 2**16, 2**31 + 1), range(2**32 - 2**16, 2**32))
APPENDED = (b"TAG", b"ID3", b"id3 ", bytes(8))  # what else may come after the chunks of a file


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a format lists its chunks.

    start: where the first one begins. samples: the name of that of the samples. name, size: bytes
    of these fields. own: of them that count as part of a chunk's size. align: chunks begin at
    multiples of it, from the begin of the file.
    """

    start: int
    samples: bytes
    order: Literal["little", "big"]
    name: int = 4
    size: int = 4
    own: int = 0
    align: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """A chunk: the place of its content, the size that its header says, and the place of that."""

    place: int
    size: int
    field: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A part that FFmpeg reads as a file: a link of a chain of Ogg, another file whole.

    share: the size of the samples that the header said, divided by that which they have: more than
    1 where the file is cut off. stated: seconds that a header says which FFmpeg does not tell.
    num_lost: packets that end on pages with a wrong checksum. num_samples: at most so many, where
    the last page says so; FFmpeg reads more of a link of one page.
    """

    blob: bytes
    share: float = 1.0
    stated: float | None = None
    num_lost: int = 0
    num_samples: int | None = None


WAVE = Layout(start=12, samples=b"data", order="little")
LAYOUTS: Mapping[bytes, Layout] = MappingProxyType(
    {
        b"RIFF": WAVE,
        b"RF64": WAVE,
        b"BW64": WAVE,
        b"FORM": Layout(start=12, samples=b"SSND", order="big"),
        b"caff": Layout(start=8, samples=b"data", order="big", size=8, align=1),
        b"riff": Layout(
            start=40,
            samples=b"data\xf3\xac\xd3\x11\x8c\xd1\x00\xc0\x4f\x8e\xdb\x8a",
            order="little",
            name=16,
            size=8,
            own=24,
            align=8,
        ),
    }
)
LARGE, DS64, DATA_SIZE = (b"RF64", b"BW64"), b"ds64", 8  # where the size of the samples stands


def whole(blob: bytes) -> Link:
    """Returns a file with all the samples that are there."""
    layout = LAYOUTS.get(blob[:4])
    found = None if layout is None else chunk(blob, layout.samples, layout)
    if layout is None or found is None:
        return Link(blob=blob)
    if blob[:4] in LARGE:
        sizes = chunk(blob, DS64, layout)
        if sizes is None:
            return Link(blob=blob)
        at = sizes.place + DATA_SIZE
        said = int.from_bytes(blob[at : at + 8], "little")
        found = Chunk(place=found.place, size=said, field=at)
    end = _aligned(found.place + found.size, layout)
    there = len(blob) - found.place
    if not is_known(found.size) or not there or _are_chunks(blob, end, layout):
        is_cut = is_known(found.size) and found.size > there > 0
        return Link(blob=blob, share=found.size / there if is_cut else 1.0)
    width = 8 if blob[:4] in LARGE else layout.size
    size = min(there + layout.own, 2 ** (8 * width) - 1).to_bytes(width, layout.order)
    mended = blob[: found.field] + size + blob[found.field + width :]
    return Link(blob=mended, share=found.size / there)


def chunk(blob: bytes, name: bytes, layout: Layout = WAVE) -> Chunk | None:
    """Returns a chunk by its name, None where there is none."""
    at = layout.start
    for _ in range(MAX_CHUNKS):
        head = layout.name + layout.size
        if at + head > len(blob):
            return None
        size = _size(blob, at, layout)
        if blob[at : at + layout.name] == name:
            return Chunk(place=at + head, size=size, field=at + layout.name)
        at = _aligned(at + head + max(size, 0), layout)
    return None


def is_known(size: int) -> bool:
    """Returns whether a size of samples is one that a program has written on purpose."""
    return size > 0 and not any(size in sizes for sizes in UNKNOWN)


def _size(blob: bytes, at: int, layout: Layout) -> int:
    field = blob[at + layout.name : at + layout.name + layout.size]
    return int.from_bytes(field, layout.order, signed=layout.size == 8) - layout.own


def _aligned(place: int, layout: Layout) -> int:
    return -(-place // layout.align) * layout.align


def _are_chunks(blob: bytes, at: int, layout: Layout) -> bool:
    """Returns whether chunks, or tags, or nothing, are from here on to the end."""
    head = layout.name + layout.size
    while at + head <= len(blob):
        size = _size(blob, at, layout)
        if blob.startswith(APPENDED, at):
            return True
        if not all(32 <= byte < 127 for byte in blob[at : at + 4]) or size < 0:
            return False
        if at + head + size > len(blob):
            return False
        at = _aligned(at + head + size, layout)
    return True
