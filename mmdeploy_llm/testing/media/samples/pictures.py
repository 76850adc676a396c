"""Generates pictures: samples, twins that differ in a few bytes only, and headers that claim
giants."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from mmdeploy_llm.hooks import MediaLimits

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Twins = dict[str, tuple[Any, Any]]

TWIN_SIDE = 1200  # pixels: 4.3 MB, more than a digest of a part would read
GIANT_SIDE = 16_000  # pixels; 256 million of one bit each fit in 150 kB
ORIENTATION, ON_ITS_SIDE = 0x0112, 6  # a tag of EXIF and a value of it


def samples() -> dict[str, Any]:
    """Returns name -> source, all of different content."""
    return {
        "png": image_bytes(pixels(48, 80, seed=1), "PNG"),
        "jpeg": image_bytes(pixels(64, 64, seed=2), "JPEG"),
        "tall png": image_bytes(pixels(120, 40, seed=3), "PNG"),
        "pillow image": Image.fromarray(pixels(56, 56, seed=4)),
        "array": pixels(40, 72, seed=5),
        "large png": image_bytes(noise(170, 330, seed=6), "PNG"),
        "photo on its side": _on_its_side(pixels(60, 90, seed=7)),
    }


def unloaded() -> list[Any]:
    """Returns sources that are read only when they are used, each of the same content."""
    blob = image_bytes(noise(200, 300, seed=10), "PNG")
    return [Image.open(io.BytesIO(blob), formats=["PNG"]) for _ in range(5)]


def twins() -> Twins:
    """Returns name -> two sources that differ in their last, middle or first pixels only."""
    size = (TWIN_SIDE, TWIN_SIDE, 3)
    picture = np.random.default_rng(8).integers(0, 256, size, dtype=np.uint8)
    edge = TWIN_SIDE // 4
    found: Twins = {}
    for name, top in (("last", TWIN_SIDE - edge), ("middle", edge), ("first", 0)):
        other = picture.copy()
        other[top : top + edge] = 255 - other[top : top + edge]
        found[f"arrays that differ in their {name} bytes"] = picture, other
        if name == "last":
            files = stored_png(picture), stored_png(other)
            found["files that differ in their last bytes"] = files
            found["Pillow images that differ in their last bytes"] = (
                Image.fromarray(picture),
                Image.fromarray(other),
            )
    flat = pixels(64, 96, seed=9)
    found["arrays of the same bytes in another shape"] = flat, flat.reshape(96, 64, 3)
    return found


def too_large() -> dict[str, tuple[Any, MediaLimits]]:
    """Returns name -> (source, limits that it exceeds)."""
    limits = MediaLimits(max_pixels=64 * 64 - 1)
    return {
        "pixels of a file truncated after its header": (png_header(30_000, 30_000), MediaLimits()),
        "pixels of an array": (pixels(64, 64, seed=1), limits),
        "pixels of a Pillow image": (Image.fromarray(pixels(64, 64, seed=1)), limits),
        "a whole file of giant size": (png_bomb(GIANT_SIDE), MediaLimits()),
    }


def giants() -> dict[str, bytes]:
    """Returns name -> a few bytes that claim an image of billions of pixels, in further formats."""
    side = 60_000
    bmp = struct.pack("<IHHIIiiHHIIiiII", 100, 0, 0, 54, 40, side, side, 1, 24, *[0] * 6)
    frame = struct.pack("<HHHHB", 0, 0, side, side, 0)
    gif = struct.pack("<HHBBB", side, side, 0, 0, 0) + b"," + frame + b"\x08\x01\x00\x00;"
    return {
        "jpeg": jpeg_header(side, side),
        "bmp": b"BM" + bmp,
        "gif": b"GIF89a" + gif,
        "tiff": _tiff_header(side, side),
    }


def pixels(height: int, width: int, *, seed: int) -> Pixels:
    """Returns a smooth random RGB picture, uint8 [height, width, 3]."""
    corners = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(picture)


def noise(height: int, width: int, *, seed: int) -> Pixels:
    """Returns a random RGB picture on a smooth one: no way to resize it gives what another does."""
    fine = np.random.default_rng(seed).integers(0, 128, (height, width, 3), dtype=np.uint8)
    return pixels(height, width, seed=seed) // 2 + fine


def image_bytes(picture: Pixels, form: str) -> bytes:
    """Encodes the picture in Pillow's format `form`."""
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, form)
    return buffer.getvalue()


def stored_png(picture: Pixels) -> bytes:
    """Encodes a PNG without compression: its last bytes are its last pixels."""
    height, width, _ = picture.shape
    rows = np.zeros((height, 1 + width * 3), np.uint8)  # each begins with the number of its filter
    rows[:, 1:] = picture.reshape(height, -1)
    return _png(
        struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0), zlib.compress(rows.tobytes(), 0)
    )


def png_header(width: int, height: int) -> bytes:
    """Returns a PNG file that declares this size and ends after its header."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + struct.pack(">I", 1 << 20) + b"IDAT"


def png_bomb(side: int) -> bytes:
    """Returns a whole PNG of side x side pixels of one bit, all black, in few bytes."""
    rows = bytes((1 + -(-side // 8)) * side)
    return _png(struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0), zlib.compress(rows, 1))


def _png(header: bytes, content: bytes) -> bytes:
    parts = (_chunk(b"IHDR", header), _chunk(b"IDAT", content), _chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def jpeg_header(width: int, height: int) -> bytes:
    """Returns the beginning of a JPEG file that declares this size."""
    frame = struct.pack(">BHHB", 8, height, width, 3) + bytes([1, 17, 0, 2, 17, 0, 3, 17, 0])
    scan = bytes([3, 1, 0, 2, 0, 3, 0, 0, 63, 0])
    return b"\xff\xd8" + _segment(0xC0, frame) + _segment(0xDA, scan)


def _segment(mark: int, content: bytes) -> bytes:
    return bytes([0xFF, mark]) + struct.pack(">H", len(content) + 2) + content


def _chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", checksum)


def _tiff_header(width: int, height: int) -> bytes:
    """Returns a TIFF file of one uncompressed strip, which is missing."""
    entries = ((256, width), (257, height), (258, 8), (259, 1), (262, 1), (273, 200), (277, 1),
               (278, height), (279, 1 << 30))  # fmt: skip
    packed = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries)
    return b"II*\x00" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)


def _on_its_side(picture: Pixels) -> bytes:
    """Encodes a JPEG whose EXIF says that it must be rotated."""
    image, buffer = Image.fromarray(picture), io.BytesIO()
    exif = image.getexif()
    exif[ORIENTATION] = ON_ITS_SIDE
    image.save(buffer, "JPEG", exif=exif)
    return buffer.getvalue()
