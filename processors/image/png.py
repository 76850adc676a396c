"""PNG files whose metadata come after their pixels, which Pillow reads with the pixels only."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks that can say how an image is turned, by what their data begin with.
TURNS = {
    b"eXIf": b"",
    b"iTXt": b"XML:com.adobe.xmp\0",
    b"tEXt": b"Raw profile type exif\0",
    b"zTXt": b"Raw profile type exif\0",
}


def metadata_first(blob: bytes) -> bytes:
    """A PNG of the same header with what it says about its orientation before its pixels, which it
    has none of; `blob` itself where nothing comes after them. Only the chunks' heads are read."""
    if not blob.startswith(SIGNATURE):
        return blob
    first_pixels, late = len(blob), b""
    for kind, start, data in _chunks(blob):
        if kind in (b"IEND", b"fcTL") and start > first_pixels:
            break  # fcTL: the second frame, before which Pillow stops as well
        if kind == b"IDAT":
            first_pixels = min(first_pixels, start)
        elif start > first_pixels and kind in TURNS and data[:32].tobytes().startswith(TURNS[kind]):
            late += _chunk(kind, data.tobytes())
    return blob[:first_pixels] + late + _chunk(b"IDAT", b"") if late else blob


def _chunks(blob: bytes) -> Iterator[tuple[bytes, int, memoryview]]:
    """(kind, place, data) of the chunks that are there in full."""
    view, place = memoryview(blob), len(SIGNATURE)
    while place + 12 <= len(blob):  # length, kind, data, checksum
        length, kind = struct.unpack_from(">I4s", blob, place)
        end = place + 8 + length
        if end > len(blob):
            return
        yield kind, place, view[place + 8 : end]
        place = end + 4


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
