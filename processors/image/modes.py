"""Any Pillow mode to RGB: transparency on white, 16-bit and float values scaled, EXIF orientation
applied."""

from __future__ import annotations

import struct

import numpy as np
from PIL import Image, ImageCms

from mmdeploy_llm.errors import UnsupportedMediaError

ORIENTATION = 0x0112  # the EXIF tag
WHITE = (255, 255, 255, 255)

# EXIF orientation -> what makes the image upright (EXIF 2.3, section 4.6.4).
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS = (5, 6, 7, 8)  # these swap width and height
PREMULTIPLIED = {"RGBa": "RGBA", "La": "LA"}


def orientation_of(image: Image.Image) -> int:
    """The EXIF orientation, 1 (upright) where there is none or the EXIF data are broken, as
    browsers do."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except (OSError, SyntaxError, ValueError, KeyError, IndexError, TypeError, struct.error):
        return 1
    return value if value in TURNS else 1


def upright(image: Image.Image, orientation: int) -> Image.Image:
    """The image turned by its EXIF orientation."""
    return image.transpose(TURNS[orientation]) if orientation in TURNS else image


def to_rgb(image: Image.Image) -> Image.Image:
    """A loaded image in RGB; `image` itself when it is so already. Raises UnsupportedMediaError."""
    if image.mode in PREMULTIPLIED:
        image = image.convert(PREMULTIPLIED[image.mode])
    if image.mode.startswith("I;16"):
        return _from_16_bit(image)
    if image.mode in ("I", "F"):
        return gray_to_rgb(_to_8_bit(np.asarray(image)))
    if image.mode == "LAB":
        return _from_lab(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return on_white(image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def on_white(image: Image.Image) -> Image.Image:
    """An RGBA image composed onto white."""
    return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image).convert("RGB")


def gray_to_rgb(values: np.ndarray) -> Image.Image:
    """uint8 [H, W] as a gray RGB image."""
    return Image.fromarray(values).convert("RGB")


def scale_16_bit(values: np.ndarray) -> np.ndarray:
    """0..65535 to 0..255, rounded: 257 sixteen-bit steps are one eight-bit step."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _from_16_bit(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.uint16)
    gray = scale_16_bit(values)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray[values == transparent] = 255
    return gray_to_rgb(gray)


def _to_8_bit(values: np.ndarray) -> np.ndarray:
    """32-bit integers or floats of unstated range to uint8.

    Floats within 0..1 are shares of white, integers above 255 are 16-bit values; all else is taken
    as 0..255. What lies outside is clipped, NaN is black.
    """
    if np.issubdtype(values.dtype, np.floating):
        values = np.nan_to_num(values, nan=0.0)
        scale = 255.0 if values.size and values.max() <= 1.0 else 1.0
        return np.rint(np.clip(values * scale, 0, 255)).astype(np.uint8)
    if values.max(initial=0) > 255:
        return scale_16_bit(np.clip(values, 0, 65535))
    return np.clip(values, 0, 255).astype(np.uint8)


def _from_lab(image: Image.Image) -> Image.Image:
    """CIE L*a*b* through littleCMS, since Pillow cannot convert it by itself."""
    try:
        return ImageCms.profileToProfile(
            image, ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB"), outputMode="RGB"
        )
    except ImportError as error:
        raise UnsupportedMediaError(
            "an image in mode LAB needs Pillow with littleCMS; convert it to RGB"
        ) from error
