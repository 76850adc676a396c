"""Says whether an image has several frames or pages, from what its pieces announce: no pixel is
decoded. What cannot be read to the end counts as a still image, whose fault its decoder finds."""

from __future__ import annotations

import os
from contextlib import suppress
from itertools import islice

from mmdeploy_llm.media.image.tiff import first_directory, pages_of
from mmdeploy_llm.system.portable import files
from mmdeploy_llm.values.first_bytes import Format

from .collections import has_several

MAX_PIECES = 100_000  # of a GIF; a second frame comes after all those of the first
MAX_CHUNKS = 64  # of a PNG before its pixels
_BLOCK = 2**16


class _File:
    """The bytes of a file, read in blocks. Raises EOFError past its end."""

    def __init__(self, fd: int) -> None:
        self._fd, self._begin, self._block = fd, 0, b""

    def at(self, place: int, size: int) -> bytes:
        """Returns `size` bytes."""
        begin = place - self._begin
        if begin < 0 or begin + size > len(self._block):
            self._begin, begin = place, 0
            self._block = files.read_at(self._fd, _BLOCK, place)
        found = self._block[begin : begin + size]
        if len(found) < size:
            raise EOFError
        return found

    def number(self, place: int) -> int:
        """Returns one byte."""
        return self.at(place, 1)[0]


def is_animated(fd: int, found: Format) -> bool:
    """Returns whether an open file of this format has several frames."""
    readers = {"GIF": _gif, "PNG": _png, "WEBP": _webp}
    with suppress(EOFError, OSError):
        return found.image in readers and readers[found.image](_File(fd))
    return False


def is_paged(fd: int, found: Format) -> bool:
    """Returns whether an open file of this format has pages beside its first picture."""
    with suppress(EOFError, OSError, OverflowError):
        if found.image == "TIFF":
            file = _File(fd)
            return [*islice(pages_of(file.at), 2)] != [first_directory(file.at)]
    return False


def is_collection(fd: int, found: Format) -> bool:
    """Returns whether an open HEIF or AVIF file has pictures beside its first one."""

    def read(place: int, size: int) -> bytes:
        data = files.read_at(fd, size, place)
        if len(data) < size:
            raise EOFError
        return data

    with suppress(EOFError, OSError, OverflowError):
        return found.image in ("AVIF", "HEIF") and has_several(read, os.fstat(fd).st_size)
    return False


def _webp(file: _File) -> bool:
    """The flag of the extended header."""
    return file.at(12, 4) == b"VP8X" and bool(file.number(20) & 0b10)


def _png(file: _File) -> bool:
    """A chunk acTL before the pixels: length, name, content, sum."""
    place = 8
    for _ in range(MAX_CHUNKS):
        head = file.at(place, 8)
        if head[4:] in (b"acTL", b"IDAT"):
            return head[4:] == b"acTL" and int.from_bytes(file.at(place + 8, 4), "big") > 1
        place += 12 + int.from_bytes(head[:4], "big")
    return False


def _gif(file: _File) -> bool:
    """A second image: each is a descriptor, perhaps a palette, and blocks of up to 255 bytes."""
    place, num_images = 13 + _palette(file.number(10)), 0
    for _ in range(MAX_PIECES):
        mark = file.number(place)
        if mark == 0x2C:
            num_images += 1
            if num_images > 1:
                return True
            place += 11 + _palette(file.number(place + 9))
        elif mark == 0x21:
            place += 2
        else:
            return False
        while size := file.number(place):
            place += 1 + size
        place += 1
    return False


def _palette(flags: int) -> int:
    """Returns the bytes of the palette that the flags announce."""
    return 3 << (flags & 0b111) + 1 if flags & 0x80 else 0
