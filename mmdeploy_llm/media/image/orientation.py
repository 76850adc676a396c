"""Reads the EXIF orientation of an image. For files this avoids Pillow's EXIF parser, which warns
about broken data: warnings cannot be silenced for one thread alone.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

from PIL import Image

ORIENTATION = 0x0112  # the tag
SIDEWAYS = (5, 6, 7, 8)  # these swap width and height

# Orientation -> the operation that makes the image upright (EXIF 2.3, section 4.6.4).
TRANSPOSES = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
XMP = re.compile(rb'tiff:Orientation(?:="|>)([1-8])')
RAW_PROFILE = "Raw profile type exif"  # ImageMagick's form: name and length, then the data in hex


def stored_orientation(info: Mapping[Any, Any]) -> int:
    """Returns the orientation in the metadata of an opened file, 1 (upright) if there is none.

    EXIF is read before XMP, as in Pillow; broken metadata are ignored, as in browsers.
    """
    found = _in_exif(_exif(info))
    if found is None:
        match = XMP.search(_xmp(info))
        found = int(match[1]) if match else 1
    return found if found in TRANSPOSES else 1


def live_orientation(image: Image.Image) -> int:
    """Returns the orientation of the caller's image object, with changes made to its EXIF."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except (OSError, SyntaxError, ValueError, LookupError, TypeError, struct.error, Warning):
        return 1
    return value if value in TRANSPOSES else 1


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """Returns the image rotated or mirrored by its orientation."""
    return image.transpose(TRANSPOSES[orientation]) if orientation in TRANSPOSES else image


def _exif(info: Mapping[Any, Any]) -> bytes:
    data = info.get("exif", b"")
    if not data and isinstance(info.get(RAW_PROFILE), str):
        try:
            data = bytes.fromhex("".join(info[RAW_PROFILE].split("\n")[3:]))
        except ValueError:
            return b""
    return data.removeprefix(b"Exif\0\0") if isinstance(data, bytes) else b""


def _xmp(info: Mapping[Any, Any]) -> bytes:
    data = info.get("xmp") or info.get("XML:com.adobe.xmp") or b""
    return data.encode("utf-8", "replace") if isinstance(data, str) else bytes(data)


def _in_exif(data: bytes) -> int | None:
    """Returns the orientation in the first directory of a TIFF structure, None without one.

    The structure: byte order mark, 42, offset of the directory; at the offset a count and entries
    of 12 bytes: tag, type (3: 16 bits), number of values, value.
    """
    order = {b"II": "<", b"MM": ">"}.get(data[:2])
    if order is None:
        return None
    try:
        (offset,) = struct.unpack_from(order + "I", data, 4)
        (count,) = struct.unpack_from(order + "H", data, offset)
        for position in range(offset + 2, offset + 2 + 12 * count, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHIH", data, position)
            if tag == ORIENTATION and kind == 3:
                return int(value)
    except struct.error:
        pass
    return None
