"""Says which images are too long for an image processor of transformers, in their sizes, not in the
words of its code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from PIL import Image

from mmdeploy_llm.errors import MediaError, MMDeployLLMError

from .loading import reason_of

# Pixels of an image that is resized by its shorter side before it is cropped or made smaller: 0.8
# GB, while a strip of 1 x 65535 pixels would need hundreds.
MOST_RESIZED = 2**28
INK = 200 / 255  # of the way from the darkest to the lightest gray: what is darker is no margin


@contextmanager
def shapes_told(fields: Mapping[str, Any], size: tuple[int, int]) -> Iterator[None]:
    """Raises MediaError for an image of (width, height) that is too long, or on which the processor
    with these fields fails in the block."""
    width, height = size
    times, most = max(size) / min(size), longest_shape(fields, is_upright=height > width)
    if most is not None and times > most:
        raise MediaError(
            f"an image of {width} x {height} pixels is too long: its longer side may be up to "
            f"{int(most)} times its shorter one for this model, found {times:.0f}; crop or pad it"
        )
    try:
        yield
    except MMDeployLLMError:
        raise
    except Exception as error:  # transformers raises whatever its classes raise
        raise MediaError(
            f"transformers cannot prepare this image of {width} x {height} pixels; crop or pad it "
            f"where it, or all that is not its margin, is far longer than wide ({reason_of(error)})"
        ) from error


def without_margin(
    image: Image.Image, fields: Mapping[str, Any]
) -> tuple[tuple[int, int], Mapping[str, Any]]:
    """Returns (width, height) of what a processor with these fields resizes, without the margin if
    it crops that, and fields with which it does so. What stands on a page that holds one rule alone
    may be far too long, where the page is not: such a page keeps its margin, as a blank one does.
    """
    if not fields.get("do_crop_margin"):
        return image.size, {}
    gray = np.asarray(image.convert("L"))
    low, high = int(gray.min()), int(gray.max())
    ink = gray < low + INK * (high - low)
    rows, columns = (np.flatnonzero(ink.any(axis=axis)) for axis in (1, 0))
    if low == high or not len(rows):
        return image.size, {}
    width, height = (int(found[-1] - found[0]) + 1 for found in (columns, rows))
    most = longest_shape(fields, is_upright=height > width)
    if most is not None and max(width, height) > most * min(width, height):
        return image.size, {"do_crop_margin": False}
    return (width, height), {}


def longest_shape(fields: Mapping[str, Any], *, is_upright: bool) -> float | None:
    """Returns how many times an image's shorter side its longer one may be; None: any times."""
    sides = fields.get("size")
    if fields.get("do_resize") is False or not isinstance(sides, Mapping):
        return None
    given = {name: side for name, side in sides.items() if side}
    shorter, longer = given.get("shortest_edge"), None
    if fields.get("do_thumbnail") and {"height", "width"} <= given.keys():
        # It is resized to the shorter side first, then made so small that the longer one fits.
        shorter, longer = min(given.values()), given["height" if is_upright else "width"]
    elif len(given) > 1:
        return None
    if not isinstance(shorter, int):
        return None
    found = MOST_RESIZED / shorter**2
    return found if longer is None else min(found, longer)
