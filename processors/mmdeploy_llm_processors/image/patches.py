"""Chooses the sizes that images and frames have as grids of patches, as transformers' PIL image
processors."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image

from mmdeploy_llm import media
from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import PixelKernels

from .options import ImageOptions

MAX_ASPECT = 200
__all__ = [
    "MAX_ASPECT",
    "check_aspect",
    "fit_frames",
    "fit_size",
    "resize",
    "unresized",
]


def fit_size(height: int, width: int, options: ImageOptions) -> tuple[int, int]:
    """Returns (height, width) after resizing: multiples of `factor`, with the area within the
    bounds and nearly the same aspect.

    Each side is at least one `factor`, even if that exceeds a very small `max_pixels`. Raises
    MediaError for an image more than 200 times as long as wide.
    """
    factor = options.factor
    if not options.do_resize:
        return unresized(height, width, factor)
    check_aspect(height, width)
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > options.max_pixels:
        shrink = math.sqrt((height * width) / options.max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < options.min_pixels:
        grow = math.sqrt(options.min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def fit_frames(
    height: int,
    width: int,
    num_frames: int,
    options: ImageOptions,
    *,
    group: int = 2,
    max_area: int | None = None,
) -> tuple[int, int]:
    """Returns (height, width) of a frame after resizing: multiples of `factor`, with the area of
    all frames together within the bounds and nearly the same aspect. A side below one factor is
    enlarged first.

    num_frames: at least `group`, the frames of a patch. max_area: replaces options.max_pixels.
    Source: smart_resize of transformers' processors of videos. Raises MediaError for frames more
    than 200 times as long as wide.
    """
    factor = options.factor
    max_area = options.max_pixels if max_area is None else max_area
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_aspect(height, width)
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    area = round(num_frames / group) * group * new_height * new_width
    if area > max_area:
        shrink = math.sqrt((num_frames * height * width) / max_area)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif area < options.min_pixels:
        grow = math.sqrt(options.min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def check_aspect(height: int, width: int) -> None:
    """Raises MediaError for an image or a frame more than 200 times as long as wide."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise MediaError(
            f"an image of {width} x {height} pixels is more than {MAX_ASPECT} times as long as "
            "wide; crop or pad it"
        )


def unresized(height: int, width: int, factor: int) -> tuple[int, int]:
    """Returns the size as it is. Raises MediaError if patches do not fill it."""
    if height % factor or width % factor:
        raise MediaError(
            f"do_resize is off and the image of {width} x {height} pixels is not a multiple of "
            f"{factor} in both directions; resize it or turn do_resize on"
        )
    return height, width


def resize(
    image: Image.Image,
    height: int,
    width: int,
    options: ImageOptions,
    kernels: PixelKernels | None = None,
) -> np.ndarray:
    """Resizes the RGB image to its target size, uint8 [H, W, 3]. kernels: see media.resize."""
    if options.do_resize:
        return media.resize(image, height, width, options.resample, kernels)
    return media.to_array(image)
