"""Finds PNG metadata that come after the pixels, which Pillow reads only with the pixels."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Chunks that can hold an orientation -> the first bytes of their data.
CHUNKS = {
    b"eXIf": b"",
    b"iTXt": b"XML:com.adobe.xmp\0",
    b"tEXt": b"Raw profile type exif\0",
    b"zTXt": b"Raw profile type exif\0",
}


def metadata_first(blob: bytes) -> bytes:
    """Returns a PNG with the same header and orientation but without pixels, if orientation data
    come after the pixels; else `blob` itself. Reads only the chunks' headers."""
    if not blob.startswith(SIGNATURE):
        return blob
    first_pixels, late = len(blob), b""
    for kind, start, data in _chunks(blob):
        if kind in (b"IEND", b"fcTL") and start > first_pixels:
            break  # fcTL: the second frame, before which Pillow stops as well
        if kind == b"IDAT":
            first_pixels = min(first_pixels, start)
        elif (
            start > first_pixels and kind in CHUNKS and data[:32].tobytes().startswith(CHUNKS[kind])
        ):
            late += _chunk(kind, data.tobytes())
    return blob[:first_pixels] + late + _chunk(b"IDAT", b"") if late else blob


def _chunks(blob: bytes) -> Iterator[tuple[bytes, int, memoryview]]:
    """Yields (kind, position, data) of all complete chunks."""
    view, position = memoryview(blob), len(SIGNATURE)
    while position + 12 <= len(blob):  # length, kind, data, checksum
        length, kind = struct.unpack_from(">I4s", blob, position)
        end = position + 8 + length
        if end > len(blob):
            return
        yield kind, position, view[position + 8 : end]
        position = end + 4


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
