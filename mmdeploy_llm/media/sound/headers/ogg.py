"""Takes Ogg files apart: what programs append to a file are streams of their own, one after the
other. FFmpeg decodes such a chain with the state of its first link, and skips damaged pages.

    page: "OggS" 0 flags | granule 8 | serial 4 | number 4 | checksum 4 | n | n sizes | packets
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from .chunks import Link

MAGIC = b"OggS"
HEADER = 27  # bytes before the sizes
CHECKSUM = slice(22, 26)
BEGINS = 2  # flag of the first page of a stream
VORBIS = b"\x01vorbis"  # how its first packet begins; granules are samples
REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    start: int
    begins: bool
    is_vorbis: bool
    granule: int
    num_lost: int


def links(blob: bytes) -> Iterator[Link]:
    """Yields the links of a file, which together are the file. All streams of a link begin on its
    first pages."""
    held: list[_Page] = []
    for page in _pages(blob):
        if page.begins and held and not held[-1].begins:
            yield _link(blob[held[0].start : page.start], held)
            held = []
        held.append(page)
    yield _link(blob[held[0].start :], held) if held else Link(blob=blob)


def _link(blob: bytes, pages: list[_Page]) -> Link:
    streams = [page for page in pages if page.begins]
    is_vorbis = len(streams) == 1 and streams[0].is_vorbis and pages[-1].granule > 0
    return Link(
        blob=blob,
        num_lost=sum(page.num_lost for page in pages),
        num_samples=pages[-1].granule if is_vorbis else None,
    )


def _pages(blob: bytes) -> Iterator[_Page]:
    """Yields the pages that are whole. After a damaged one whose size is wrong the next is
    looked for within it."""
    at = blob.find(MAGIC)
    while at >= 0:
        sizes = blob[at + HEADER : at + HEADER + blob[at + 26]] if at + 26 < len(blob) else b""
        end = at + HEADER + len(sizes) + sum(sizes)
        if end > len(blob) or not sizes:
            at = blob.find(MAGIC, at + len(MAGIC))
            continue
        is_whole = _checksum(blob[at:end]) == blob[at:end][CHECKSUM]
        yield _Page(
            start=at,
            begins=is_whole and bool(blob[at + 5] & BEGINS),
            is_vorbis=blob.startswith(VORBIS, at + HEADER + len(sizes)),
            granule=int.from_bytes(blob[at + 6 : at + 14], "little", signed=True),
            num_lost=0 if is_whole else sum(size < 255 for size in sizes),
        )
        is_end = is_whole or blob[end : end + len(MAGIC)] == MAGIC
        at = blob.find(MAGIC, end if is_end else at + len(MAGIC))


def _checksum(page: bytes) -> bytes:
    """Returns Ogg's CRC 32 of a page: zlib's polynomial, read from the other end."""
    blank = page[: CHECKSUM.start] + bytes(4) + page[CHECKSUM.stop :]
    crc = zlib.crc32(blank.translate(REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int(f"{crc:032b}"[::-1], 2).to_bytes(4, "little")
