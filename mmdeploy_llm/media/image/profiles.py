"""Converts colours by an image's ICC profile to sRGB, through littleCMS, as browsers do.

A profile is tried once on colours from all over its space: where sRGB's own come back, as of most
photos, the image stays as it is, without a look at its pixels.
"""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

MODES = {b"RGB ": "RGB", b"GRAY": "L", b"CMYK": "CMYK"}  # by the profile's space, ICC.1 7.2.6
GRAYS = ("1", "L", "LA")
NUM_PROFILES = 16  # whose transforms are kept; a file of many photos has few
SMALLEST = 128  # bytes: the header
SAME = 2  # of 255: how far colours may be from sRGB's and count as such
BROKEN = "the image's colour profile cannot be read; its colours were taken as sRGB"


def to_srgb(
    image: Image.Image, profile: bytes, notes: list[str], *, is_transparent: bool
) -> Image.Image:
    """Returns the image, or one in RGB (RGBA if it is transparent) whose colours are sRGB's.

    notes: gets a sentence about a profile that cannot be used.
    """
    wanted = MODES.get(bytes(profile[16:20]))
    if wanted is None or len(profile) < SMALLEST:
        notes.append(BROKEN)
        return image
    if (wanted == "L" and image.mode not in GRAYS) or (wanted == "CMYK") != (image.mode == "CMYK"):
        notes.append("the image's colour profile is of another kind than its pixels, and not used")
        return image
    try:
        transform = _transform(bytes(profile), wanted)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError, ImportError):
        notes.append(BROKEN)
        return image
    if transform is None:
        return image
    alpha = image.convert("RGBA").getchannel("A") if is_transparent else None
    made = transform.apply(image if image.mode == wanted else image.convert(wanted))
    if alpha is not None:
        made.putalpha(alpha)
    return made


@lru_cache(NUM_PROFILES)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Returns what makes sRGB of images in this mode, None for a profile that equals sRGB. Raises
    PyCMSError for one that littleCMS cannot read."""
    made = ImageCms.buildTransform(
        ImageCms.ImageCmsProfile(io.BytesIO(profile)), ImageCms.createProfile("sRGB"), mode, "RGB"
    )
    if mode == "CMYK":
        return made
    tried = _samples(mode)
    gap = np.asarray(made.apply(tried), np.int16) - np.asarray(tried.convert("RGB"), np.int16)
    return made if np.abs(gap).max() > SAME else None


def _samples(mode: str) -> Image.Image:
    steps = np.arange(0, 256, 15).astype(np.uint8)
    if mode == "L":
        return Image.fromarray(steps[None])
    cube = np.stack(np.meshgrid(steps, steps, steps), axis=-1)
    return Image.fromarray(np.ascontiguousarray(cube.reshape(1, -1, 3)))
