"""Reads the pixels of a TIFF, and checks that all strips and tiles are there.

libtiff reads what is compressed. Pillow's own reader of what is not takes planes of 16 bits for 8,
and knows neither subsampled colours nor a plane of alpha: libtiff reads these too.
"""

from __future__ import annotations

import io
import sys
import zlib
from typing import Any

from PIL import Image, ImagePalette, TiffImagePlugin

from mmdeploy_llm.errors import MediaError

WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC, COLOUR_MAP = 256, 257, 258, 259, 262, 320
SAMPLES, ROWS, PLANES, TILE_WIDTH, TILE_HEIGHT, EXTRA_SAMPLES = 277, 278, 284, 322, 323, 338
YCBCR = 6  # of PHOTOMETRIC
NONE, JPEG, DEFLATES = 1, 7, (8, 32946)  # of COMPRESSION
PLACES = ((273, 279), (324, 325))  # tags of places and lengths: of strips, of tiles
FIRST_PLACE = 8  # before it is the header
NATIVE = b"II" if sys.byteorder == "little" else b"MM"
END_OF_JPEG = b"\xff\xd9"


class ExactTiff(TiffImagePlugin.TiffImageFile):
    """A TIFF whose strips and tiles must be whole. libtiff gives numbers in this machine's order of
    bytes, whatever that of the file is: so the file is set up as one of this order."""

    def _setup(self) -> None:
        tags: Any = self.tag_v2
        stored = {tag: tags[tag] for tag in (COMPRESSION, PHOTOMETRIC) if tag in tags}
        is_plain = self._is_plain()
        prefix, tags._prefix = tags._prefix, tags._prefix if is_plain else NATIVE
        if stored.get(COMPRESSION, NONE) == NONE and not is_plain:
            tags[COMPRESSION] = DEFLATES[0]  # any that Pillow leaves to libtiff
        if stored.get(PHOTOMETRIC) == 0 and max(tags.get(BITS, (1,))) > 8:
            tags[PHOTOMETRIC] = 1  # Pillow turns no such numbers over: numbers.py does
        try:
            super()._setup()
        finally:
            tags.pop(COMPRESSION, None)
            for tag, value in stored.items():
                tags[tag] = value
            tags._prefix = prefix
        if tags.get(PLANES, 1) != 1 and self.mode in ("LA", "La", "PA"):
            raise SyntaxError("unknown data organization")  # Pillow leaves out the second plane
        colours = tags.get(COLOUR_MAP)
        if self.mode in ("P", "PA") and colours and max(colours) < 256:  # of 8 bits, by mistake
            self.palette = ImagePalette.raw("RGB;L", bytes(colours))

    def load(self) -> Any:
        """Decodes the pixels. Raises MediaError for strips or tiles that are missing or damaged."""
        if self.tile and not self._are_blocks_whole():
            raise MediaError("the TIFF image is damaged: a strip or a tile is missing or not whole")
        return super().load()

    def _is_plain(self) -> bool:
        """Whether Pillow's own reader of what is not compressed is right, which is quicker."""
        tags = self.tag_v2
        if tags.get(COMPRESSION, NONE) != NONE:
            return False
        is_of_bytes = max(tags.get(BITS, (1,))) <= 8
        if tags.get(PLANES, 1) != 1:
            return is_of_bytes and EXTRA_SAMPLES not in tags
        return (is_of_bytes or tags.prefix == NATIVE) and tags.get(PHOTOMETRIC) != YCBCR

    def _are_blocks_whole(self) -> bool:
        """Whether each strip or tile is in the file, and as it was written, as far as its
        compression can tell."""
        compression, data = self.tag_v2.get(COMPRESSION, NONE), self._whole()
        starts, lengths = self._places()
        if len(starts) != len(lengths) or lengths == (0,):  # lost: libtiff finds what is missing
            return True
        least = self._least_lengths()
        if len(starts) < len(least):
            return False
        for start, length, needed in zip(starts, lengths, least, strict=False):
            block = data[start : start + length]
            if start < FIRST_PLACE or not 0 < length == len(block):
                return False
            if not (length >= needed if compression == NONE else _is_whole(block, compression)):
                return False
        return True

    def _places(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the places and the lengths of all strips or tiles."""
        for tags in PLACES:
            if tags[0] in self.tag_v2:
                starts, lengths = (_as_tuple(self.tag_v2.get(tag)) for tag in tags)
                return starts, lengths
        return (), ()

    def _least_lengths(self) -> list[int]:
        """Returns the bytes of each strip or tile where it is not compressed, and at least 1: of
        subsampled colours, which have fewer."""
        tags: Any = self.tag_v2
        width, height, samples = tags[WIDTH], tags[HEIGHT], tags.get(SAMPLES, 1)
        planes = samples if tags.get(PLANES, 1) == 2 else 1
        is_tiled = TILE_WIDTH in tags
        rows = tags[TILE_HEIGHT] if is_tiled else min(tags.get(ROWS, height), height)
        across = -(-width // tags[TILE_WIDTH]) if is_tiled else 1
        bits = max(tags.get(BITS, (1,))) * samples // planes
        line = -(-(tags[TILE_WIDTH] if is_tiled else width) * bits // 8)
        if tags.get(PHOTOMETRIC) == YCBCR:
            line = 0
        tops = range(0, height, rows)
        heights = [rows if is_tiled else min(rows, height - top) for top in tops]
        return [max(1, line * own) for own in heights for _ in range(across)] * planes

    def _whole(self) -> memoryview:
        assert isinstance(self.fp, io.BytesIO), "a file is read before it is opened"
        return memoryview(self.fp.getvalue())  # which copies nothing


def exactly(image: Image.Image) -> Image.Image:
    """Returns a TIFF that the caller has opened and not loaded yet as an ExactTiff at its current
    frame, else `image` itself, which is not changed."""
    file = getattr(image, "fp", None)
    if type(image) is not TiffImagePlugin.TiffImageFile or file is None or not image.tile:
        return image
    position, frame = file.tell(), image.tell()
    file.seek(0)
    found = ExactTiff(io.BytesIO(file.read()))
    file.seek(position)
    found.seek(frame)
    return found


def _is_whole(block: memoryview, compression: int) -> bool:
    """Whether a block is as it was written, as far as its compression can tell."""
    if compression == JPEG:
        return END_OF_JPEG in bytes(block[-16:])
    if compression in DEFLATES:
        inflated = zlib.decompressobj()
        try:  # libtiff does not read the checksum at the end
            inflated.decompress(block)
        except zlib.error:
            return False
        return inflated.eof
    return True


def _as_tuple(value: Any) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)
