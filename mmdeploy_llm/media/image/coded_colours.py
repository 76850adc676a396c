"""Reads which colours an image without an ICC profile says that it has: by numbers of ITU-T H.273
(PNG's chunk cICP, the box colr of AVIF), or by PNG's chunks gAMA and cHRM.

PQ and HLG become the range that models know. Other colours than sRGB's stay, and are told.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from PIL import Image

from .hdr import HLG, PQ, to_sdr
from .modes import to_rgb
from .png import chunk_before_pixels

UNSPECIFIED, BT_2020 = 2, 9  # primaries, ITU-T H.273, table 2
PRIMARIES = {4: "NTSC", 5: "PAL", 6: "BT.601", 7: "SMPTE 240M", 9: "BT.2020", 11: "P3", 12: "P3"}
LIKE_SRGB = (1, 5, 6, 7, UNSPECIFIED)  # primaries that nobody tells apart on a photo
BOX = b"colrnclx"
HEAD = 2**16  # bytes of an AVIF in which its properties stand
GAMMA, CHROMATICITY = 1 / 2.2, (0.3127, 0.329, 0.64, 0.33, 0.3, 0.6, 0.15, 0.06)  # of sRGB
TOLERANCE = 0.02


def shown(
    image: Image.Image,
    notes: list[str],
    *,
    is_managed: bool,
    blob: bytes = b"",
    name: str | None = None,
) -> Image.Image:
    """Returns a loaded image in RGB. notes, is_managed: see to_rgb; colours that are managed become
    sRGB's by their codes too. blob: the file, in the format `name`, of which Pillow keeps no codes;
    what it has read, such as another gamma, it keeps."""
    colours = to_rgb(image, notes, is_managed=is_managed)
    return as_coded(colours, blob, name, image.info, notes) if is_managed else colours


def as_coded(
    image: Image.Image, blob: bytes, name: str | None, info: Mapping[Any, Any], notes: list[str]
) -> Image.Image:
    """Returns an image in RGB in the range of sRGB. blob: its file, in the format `name`; info:
    what Pillow has read of it. notes: gets a sentence about colours that stay as they are."""
    if info.get("icc_profile"):
        return image
    primaries, transfer = _codes(blob, name)
    if transfer in (PQ, HLG) and primaries in (BT_2020, UNSPECIFIED):
        return to_sdr(image, transfer)
    others = PRIMARIES.get(primaries, "") if primaries not in LIKE_SRGB else ""
    if transfer in (PQ, HLG):
        others = f"{others} in high dynamic range".strip()
    elif primaries == UNSPECIFIED and _has_other_gamma(info):
        others = "PNG's chunks gAMA or cHRM"
    if others:
        notes.append(f"the image's colours are those of {others}, and were taken as sRGB's")
    return image


def _codes(blob: bytes, name: str | None) -> tuple[int, int]:
    """Returns the numbers of primaries and transfer, UNSPECIFIED where a file does not say them."""
    if name == "PNG":
        codes = chunk_before_pixels(blob, b"cICP")
        if len(codes) >= 2:
            return codes[0], codes[1]
    if name == "AVIF":
        _, found, codes = blob[:HEAD].partition(BOX)
        if found and len(codes) >= 4:
            primaries, transfer = struct.unpack_from(">HH", codes)
            return primaries, transfer
    return UNSPECIFIED, UNSPECIFIED


def _has_other_gamma(info: Mapping[Any, Any]) -> bool:
    if "srgb" in info:
        return False
    gamma, points = info.get("gamma", GAMMA), info.get("chromaticity", CHROMATICITY)
    return abs(gamma - GAMMA) > TOLERANCE or any(
        abs(one - other) > TOLERANCE for one, other in zip(points, CHROMATICITY, strict=False)
    )
