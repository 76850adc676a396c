"""Says how kernels resize an image bit for bit as Pillow does: which pixels an output pixel is the
weighted sum of, with which weights, and which direction comes first.

Source: Pillow's src/libImaging/Resample.c: weights are doubles in its order, then rounded to
multiples of 2^-22. Pillow 12 and earlier always resize across first; 13 down first where the height
loses more than twice as many pixels as the width (its pull request 9549; found by trying sizes).
Pillow itself resizes where its version is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import PIL
import torch
from PIL import Image

from mmdeploy_llm.hooks.objects.pixels import ResizeTaps

WEIGHT_BITS = 22
Filter = Callable[[np.ndarray], np.ndarray]


def _bilinear(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    return np.where(x < 1, 1 - x, 0.0)


def _bicubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = ((-0.5 + 2) * x - (-0.5 + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * -0.5
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))


# Pillow's number -> (reach, weight by distance). Others have functions that differ by system.
FILTERS: Mapping[int, tuple[float, Filter]] = MappingProxyType(
    {
        int(Image.Resampling.BILINEAR): (1.0, _bilinear),
        int(Image.Resampling.BICUBIC): (2.0, _bicubic),
    }
)


MIN_WIDTH = 22  # of what the kernels resize; smaller images are quick everywhere
CHOOSES_ORDER, UNKNOWN = 13, 14  # major versions of Pillow


def can_resize(width: int, new_width: int, resample: int) -> bool:
    """Whether kernels can resize as Pillow does."""
    is_known = _version() < UNKNOWN and resample in FILTERS
    return is_known and min(width, new_width) >= MIN_WIDTH


def is_down_first(size: tuple[int, int], new_size: tuple[int, int]) -> bool:
    """Whether Pillow resizes this (width, height) down before across."""
    (width, height), (new_width, new_height) = size, new_size
    less = height - new_height
    return _version() >= CHOOSES_ORDER and less > max(0, 2 * (width - new_width))


def _version() -> int:
    return int(PIL.__version__.split(".")[0])


def taps(size: int, new_size: int, resample: int) -> ResizeTaps:
    """Returns the taps of resizing a line of `size` pixels to `new_size`. resample: of FILTERS."""
    reach, weight_at = FILTERS[resample]
    scale = size / new_size
    stretch = max(scale, 1.0)
    support = reach * stretch
    centers = (np.arange(new_size) + 0.5) * scale
    first = np.maximum((centers - support + 0.5).astype(np.int64), 0)
    counts = np.minimum((centers + support + 0.5).astype(np.int64), size) - first
    offsets = np.arange(math.ceil(support) * 2 + 1)
    distances = (offsets + first[:, None] - centers[:, None] + 0.5) * (1.0 / stretch)
    weights = np.where(offsets < counts[:, None], weight_at(distances), 0.0)
    sums = np.add.accumulate(weights, axis=1)[:, -1:]  # one after another, as a loop adds them
    weights = np.divide(weights, sums, out=weights, where=sums != 0) * (1 << WEIGHT_BITS)
    rounded = np.trunc(weights + np.where(weights < 0, -0.5, 0.5))
    return ResizeTaps(
        first=torch.from_numpy(first.astype(np.int32)),
        counts=torch.from_numpy(counts.astype(np.int32)),
        weights=torch.from_numpy(rounded.astype(np.int32)),
    )
