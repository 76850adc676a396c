"""Converts any Pillow mode to RGB: transparency on white, colours by the image's own profile."""

from __future__ import annotations

from PIL import Image, ImageCms

from mmdeploy_llm.errors import UnsupportedMediaError

from .numbers import are_numbers, to_gray
from .profiles import to_srgb

WHITE = (255, 255, 255, 255)
PREMULTIPLIED = {"RGBa": "RGBA", "La": "LA"}


def to_rgb(
    image: Image.Image, notes: list[str] | None = None, *, is_managed: bool = True
) -> Image.Image:
    """Converts a loaded image to RGB; returns `image` itself if it is sRGB already.

    notes: gets sentences about what was a guess. is_managed: whether colours of another profile
    become those of sRGB. Raises UnsupportedMediaError for LAB where Pillow lacks littleCMS.
    """
    told = notes if notes is not None else []
    profile = image.info.get("icc_profile") if is_managed else None
    if image.mode in PREMULTIPLIED:
        image = image.convert(PREMULTIPLIED[image.mode])
    if are_numbers(image):
        image = Image.fromarray(to_gray(image, told))
    elif image.mode == "LAB":
        return _from_lab(image)
    is_transparent = _is_transparent(image)
    if profile:
        image = to_srgb(image, profile, told, is_transparent=is_transparent)
    if is_transparent:
        return on_white(image.convert("RGBA"))
    return image if image.mode == "RGB" else image.convert("RGB")


def _is_transparent(image: Image.Image) -> bool:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        return True
    return image.mode == "P" and image.palette is not None and image.palette.mode.endswith("A")


def on_white(image: Image.Image) -> Image.Image:
    """Composes an RGBA image onto white."""
    return Image.alpha_composite(Image.new("RGBA", image.size, WHITE), image).convert("RGB")


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
