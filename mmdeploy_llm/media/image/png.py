"""Reads of a PNG what Pillow does not: the transparent colour at 2, 4 and 16 bits, and metadata
that come after the pixels.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from PIL import Image, PngImagePlugin

from mmdeploy_llm.values.first_bytes import PNG

# Chunks that can hold an orientation -> the first bytes of their data.
CHUNKS = {
    b"eXIf": b"",
    b"iTXt": b"XML:com.adobe.xmp\0",
    b"tEXt": b"Raw profile type exif\0",
    b"zTXt": b"Raw profile type exif\0",
}


GRAY_BITS = {"1": 1, "L;2": 2, "L;4": 4}  # Pillow's name of the stored samples -> bits
COLOUR_16_BIT = "RGB;16B"  # of which Pillow keeps the upper bytes
LOWER_BYTES = "RGB;16L"  # reads the other byte of each sample


class ExactPng(PngImagePlugin.PngImageFile):
    """A PNG whose transparent colour is compared with the samples as they are stored, as the
    format says (PNG specification, third edition, 11.3.2.1)."""

    _whole: bytes | None = None  # the file, where the lower bytes of its samples are needed

    def _open(self) -> None:
        super()._open()
        stored, found = self.tile[0].args if self.tile else None, self.info.get("transparency")
        if stored in GRAY_BITS and isinstance(found, int):
            largest = 2 ** GRAY_BITS[stored] - 1
            self.info["transparency"] = (found & largest) * 255 // largest
        elif stored == COLOUR_16_BIT and isinstance(found, tuple):
            if self.is_animated:  # Pillow composes the frames: of the upper bytes only
                self.info["transparency"] = tuple(value >> 8 for value in found)
            else:
                self._whole = self._read_whole()

    def load_end(self) -> None:
        """Gives the pixels of a transparent colour of 16 bits an alpha of 0."""
        super().load_end()
        if self._whole is None:
            return
        again = PngImagePlugin.PngImageFile(io.BytesIO(self._whole))
        again.tile = [tile._replace(args=LOWER_BYTES) for tile in again.tile]
        upper, lower = np.asarray(self._new(self.im)), np.asarray(again)
        colour = np.array(self.info.pop("transparency"))
        is_named = ((upper == colour >> 8) & (lower == (colour & 255))).all(axis=-1)
        alpha = np.where(is_named, 0, 255).astype(np.uint8)
        self.im = Image.fromarray(np.dstack([upper, alpha])).im
        self._mode, self._whole = "RGBA", None

    def _read_whole(self) -> bytes:
        assert self.fp is not None, "the file is being opened"
        position = self.fp.tell()
        self.fp.seek(0)
        whole = self.fp.read()
        self.fp.seek(position)
        return whole


def metadata_first(blob: bytes) -> bytes:
    """Returns a PNG with the same header and orientation but without pixels, if orientation data
    come after the pixels; else `blob` itself. Reads only the chunks' headers."""
    if not blob.startswith(PNG):
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


def chunk_before_pixels(blob: bytes, wanted: bytes) -> bytes:
    """Returns the data of a chunk that stands before the pixels, b"" where there is none."""
    for kind, _, data in _chunks(blob):
        if kind in (wanted, b"IDAT"):
            return data.tobytes() if kind == wanted else b""
    return b""


def _chunks(blob: bytes) -> Iterator[tuple[bytes, int, memoryview]]:
    """Yields (kind, position, data) of all complete chunks."""
    view, position = memoryview(blob), len(PNG)
    while position + 12 <= len(blob):  # length, kind, data, checksum
        length, kind = struct.unpack_from(">I4s", blob, position)
        end = position + 8 + length
        if end > len(blob):
            return
        yield kind, position, view[position + 8 : end]
        position = end + 4


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
