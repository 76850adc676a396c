"""Turns RGB pixels into patch rows: target size, resizing and normalisation, bit for bit as
transformers' PIL image processors.

H, W: image size; P: patch_size; M: merge_size; T: temporal_patch_size; N = H/P * W/P patches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
import torch
from PIL import Image

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import PixelKernels
from mmdeploy_llm.media.image.arrays import to_array

from .options import ImageOptions

MAX_ASPECT = 200


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


def normalise_table(options: ImageOptions) -> np.ndarray:
    """Builds the table of normalised values of each channel, float32 [3, 256].

    It holds the exact result for every 8-bit value: rescaled in float64, rounded to float32,
    normalised in float32, in transformers' order.
    """
    values = np.arange(256, dtype=np.float64)
    if options.do_rescale:
        values = values * options.rescale_factor
    table = np.broadcast_to(values.astype(np.float32), (3, 256))
    if options.do_normalize:
        mean = np.array(options.image_mean, dtype=np.float32)[:, None]
        std = np.array(options.image_std, dtype=np.float32)[:, None]
        table = (table - mean) / std
    return np.ascontiguousarray(table)


def grouped_table(table: np.ndarray, patch_size: int) -> np.ndarray:
    """Arranges `normalise_table` for `patchify_group`: [3 * 65536, 2] for pairs of values, which
    halve the look-ups, or [3 * 256, 1] where the number of pixels in a patch is odd."""
    if patch_size % 2:
        return table.reshape(-1, 1)
    pairs = np.arange(256**2, dtype=np.uint16).view(np.uint8).reshape(-1, 2)
    return np.ascontiguousarray(table[:, pairs]).reshape(-1, 2)


def resize(image: Image.Image, height: int, width: int, options: ImageOptions) -> np.ndarray:
    """Resizes the RGB image to its target size, uint8 [H, W, 3]."""
    if options.do_resize:
        image = image.resize((width, height), resample=Image.Resampling(options.resample))
    return to_array(image)


class Patchifier:
    """Makes patch rows, with kernels if they are available; the values are the same."""

    def __init__(self, options: ImageOptions) -> None:
        self._options = options
        self._table = normalise_table(options)
        self._kernels: PixelKernels | None = None

    @cached_property
    def _grouped_table(self) -> np.ndarray:
        return grouped_table(self._table, self._options.patch_size)

    def use_kernels(self, kernels: PixelKernels) -> None:
        """See MediaProcessor."""
        self._kernels = kernels

    def rows(self, pixels: np.ndarray) -> np.ndarray:
        """Turns uint8 [H, W, 3] into float32 [N, 3 * T * P * P]; the image is used as T frames."""
        options = self._options
        num_patches = pixels.shape[0] * pixels.shape[1] // options.patch_size**2
        row_size = 3 * options.temporal_patch_size * options.patch_size**2
        out = np.empty((num_patches, row_size), dtype=np.float32)
        self.fill([pixels], out)
        return out

    def fill(self, frames: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Writes the patch rows of T frames of uint8 [H, W, 3], or of one that is used T times,
        to `out`, contiguous float32 [N, 3 * T * P * P]."""
        if self._kernels is None:
            patchify_group(frames, self._grouped_table, self._options, out=out)
            return
        size, num_frames = self._options.patch_size, self._options.temporal_patch_size
        rows = torch.from_numpy(out).view(-1, 3, num_frames, size, size)
        is_still = len(frames) == 1
        for index, frame in enumerate(frames):
            self._kernels.patchify(
                torch.from_numpy(np.ascontiguousarray(frame)),
                torch.from_numpy(self._table),
                rows,
                patch_size=size,
                merge_size=self._options.merge_size,
                frames=range(num_frames) if is_still else range(index, index + 1),
            )


def patchify_group(
    frames: Sequence[np.ndarray], table: np.ndarray, options: ImageOptions, *, out: np.ndarray
) -> None:
    """Writes the patch rows of T frames of uint8 [H, W, 3], or of one that is used T times, to
    `out`, float32 [N, 3 * T * P * P].

    Rows are ordered by merged cell, then by patch in the cell: (H/PM, W/PM, M, M).
    """
    num_values = table.shape[1]  # in one table entry, which is copied as one element
    index, element = (np.uint8, np.float32) if num_values == 1 else (np.uint16, np.complex64)
    entries = table.view(element).reshape(3, -1)
    area = options.patch_size**2 // num_values
    split = out.view(element).reshape(-1, 3, options.temporal_patch_size, area)
    for frame_index, frame in enumerate(frames):
        times = slice(None) if len(frames) == 1 else slice(frame_index, frame_index + 1)
        start = 0
        for rows in _patch_rows(frame, options):
            group = split[start : start + rows.shape[1]]
            for channel in range(3):
                # No index is out of range; "clip" avoids the second buffer that "raise" needs.
                values = entries[channel].take(rows[channel].view(index), mode="clip")
                group[:, channel, times] = values[:, None]
            start += len(group)


def _patch_rows(pixels: np.ndarray, options: ImageOptions) -> Iterator[np.ndarray]:
    """Yields uint8 [H, W, 3] as uint8 [3, n, P * P] in patch order, one row of merged cells at a
    time, which fits into the CPU cache. All are the same buffer: use each before the next."""
    patch, merge = options.patch_size, options.merge_size
    rows, columns = pixels.shape[0] // options.factor, pixels.shape[1] // options.factor
    cells = pixels.reshape(rows, merge, patch, columns, merge, patch, 3)
    ordered = np.empty((3, columns, merge, merge, patch, patch), dtype=np.uint8)
    for row in cells:  # [M, P, W/PM, M, P, 3]
        # One channel of one line of patches at a time: numpy is slow when it permutes many axes.
        for channel in range(3):
            for line in range(merge):
                ordered[channel, :, line] = row[line, ..., channel].transpose(1, 2, 0, 3)
        yield ordered.reshape(3, -1, patch * patch)
