"""Converts any Pillow mode to RGB: transparency on white, 16-bit and float values scaled."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageCms

from mmdeploy_llm.errors import UnsupportedMediaError

WHITE = (255, 255, 255, 255)
PHOTOMETRIC_INTERPRETATION = 262  # a tag of TIFF

PREMULTIPLIED = {"RGBa": "RGBA", "La": "LA"}


def to_rgb(image: Image.Image) -> Image.Image:
    """Converts a loaded image to RGB; returns `image` itself if it is RGB already.

    Raises UnsupportedMediaError for LAB where Pillow lacks littleCMS.
    """
    if image.mode in PREMULTIPLIED:
        image = image.convert(PREMULTIPLIED[image.mode])
    if image.mode.startswith("I;16") or image.mode in ("I", "F"):
        gray = _from_16_bit(image) if image.mode[1:] else _to_8_bit(np.asarray(image))
        return gray_to_rgb(255 - gray if _white_is_zero(image) else gray)
    if image.mode == "LAB":
        return _from_lab(image)
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return on_white(image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _white_is_zero(image: Image.Image) -> bool:
    """Whether zeros of a TIFF are white, by its tag PhotometricInterpretation (TIFF 6.0, page 37).
    Pillow turns values of up to 8 bits over by itself, and no others."""
    tags = getattr(image, "tag_v2", {})
    return tags.get(PHOTOMETRIC_INTERPRETATION) == 0


def on_white(image: Image.Image) -> Image.Image:
    """Composes an RGBA image onto white."""
    return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image).convert("RGB")


def gray_to_rgb(values: np.ndarray) -> Image.Image:
    """Converts uint8 [H, W] to a gray RGB image."""
    return Image.fromarray(values).convert("RGB")


def scale_16_bit(values: np.ndarray) -> np.ndarray:
    """Scales 0..65535 to 0..255, rounded: 257 sixteen-bit steps are one eight-bit step."""
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)


def _from_16_bit(image: Image.Image) -> np.ndarray:
    values = np.asarray(image).astype(np.uint16)
    gray = scale_16_bit(values)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray[values == transparent] = 255
    return gray


def _to_8_bit(values: np.ndarray) -> np.ndarray:
    """Converts 32-bit integers or floats of unknown range to uint8.

    Floats up to 1 are fractions of white; integers with a value above 255 are 16-bit values; all
    else is read as 0..255. Values outside the range are clipped, NaN is black.
    """
    if np.issubdtype(values.dtype, np.floating):
        values = np.nan_to_num(values, nan=0.0)
        scale = 255.0 if values.size and values.max() <= 1.0 else 1.0
        rounded: np.ndarray = np.rint(np.clip(values * scale, 0, 255))
        return rounded.astype(np.uint8)
    if values.max(initial=0) > 255:
        return scale_16_bit(np.clip(values, 0, 65535))
    clipped: np.ndarray = np.clip(values, 0, 255)
    return clipped.astype(np.uint8)


def _from_lab(image: Image.Image) -> Image.Image:
    """Converts CIE L*a*b* through littleCMS, since Pillow cannot convert it by itself."""
    try:
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        made = ImageCms.profileToProfile(image, *profiles, outputMode="RGB")
    except ImportError as error:
        raise UnsupportedMediaError(
            "an image in mode LAB needs Pillow with littleCMS; convert it to RGB"
        ) from error
    assert made is not None, "only an in-place conversion returns None"
    return made
