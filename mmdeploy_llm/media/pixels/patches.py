"""Turns RGB pixels into the values that vision encoders read, bit for bit as transformers' PIL
image processors: resized, normalised, in patch rows.

H, W: image size; P: patch_size; M: merge_size; T: temporal_patch_size; N = H/P * W/P patches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import IO, cast

import numpy as np
import torch
from PIL import Image

from mmdeploy_llm.hooks import PixelKernels

from .taps import can_resize, is_down_first, taps


class _Target:
    """A writable file in memory from numpy, which allocates it in large pages."""

    def __init__(self, num_bytes: int) -> None:
        self.values = np.empty(num_bytes, dtype=np.uint8)
        self.position = 0
        self._view = memoryview(self.values.data)

    def write(self, data: bytes) -> int:
        """Appends the bytes; raises ValueError when they do not fit."""
        self._view[self.position : self.position + len(data)] = data
        self.position += len(data)
        return len(data)


def to_array(image: Image.Image) -> np.ndarray:
    """Copies the RGB image to a new uint8 [H, W, 3].

    The image is written as a PPM file, a header followed by the pixels: Pillow's own conversion to
    numpy holds all pixels three times, and mapping that much fresh memory costs more than copying.
    """
    head = len(f"P6\n{image.width} {image.height}\n255\n")
    target = _Target(head + 3 * image.width * image.height)
    image.save(cast("IO[bytes]", target), "PPM")  # calls only `write`
    assert target.position == target.values.size, "Pillow wrote another header"
    return target.values[head:].reshape(image.height, image.width, 3)


BICUBIC = int(Image.Resampling.BICUBIC)
# The normalisation of CLIP, which most families were trained with (transformers' OPENAI_CLIP_MEAN
# and _STD).
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchOptions:
    """Describes how pixels become patch rows.

    patch_size: pixels of a patch's side. merge_size: patches of a token's side, whose rows follow
        each other.
    temporal_patch_size: frames in a patch row, which holds channel x frame x patch x patch values.
    do_rescale: values of 0..255 are multiplied by rescale_factor.
    do_normalize: then image_mean is subtracted and the rest divided by image_std, by channel.
    """

    patch_size: int = 14
    merge_size: int = 1
    temporal_patch_size: int = 1
    do_rescale: bool = True
    rescale_factor: float = 1 / 255
    do_normalize: bool = True
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD

    @property
    def factor(self) -> int:
        """Height and width after resizing are multiples of this: pixels of a token's side."""
        return self.patch_size * self.merge_size


def resize(
    image: Image.Image,
    height: int,
    width: int,
    resample: int = BICUBIC,
    kernels: PixelKernels | None = None,
) -> np.ndarray:
    """Resizes an RGB image as Pillow does; returns uint8 [height, width, 3].

    resample: Pillow's filter number. kernels: resize with the same result in a third of the time,
    by the filters that they can.
    """
    size = width, height
    is_ours = kernels is not None and kernels.can_resize and image.size != size
    if kernels is None or not is_ours or not can_resize(image.width, width, resample):
        return to_array(image.resize(size, resample=Image.Resampling(resample)))
    out = np.empty((height, width, 3), dtype=np.uint8)
    kernels.resize(
        torch.from_numpy(to_array(image)),
        torch.from_numpy(out),
        taps(image.width, width, resample),
        taps(image.height, height, resample),
        is_down_first=is_down_first(image.size, size),
    )
    return out


def normalise(pixels: np.ndarray, options: PatchOptions) -> np.ndarray:
    """Converts uint8 [H, W, 3] to float32 [3, H, W], rescaled and normalised, without patches."""
    table = normalise_table(options)
    return np.stack([table[channel][pixels[..., channel]] for channel in range(3)])


def patchify(pixels: np.ndarray, options: PatchOptions) -> np.ndarray:
    """Converts uint8 [H, W, 3] to patch rows, float32 [N, 3 * T * P * P], as Patchifier.rows."""
    return Patchifier(options).rows(pixels)


def normalise_table(options: PatchOptions) -> np.ndarray:
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


class Patchifier:
    """Makes patch rows, with kernels if they are available; the values are the same."""

    def __init__(self, options: PatchOptions) -> None:
        self._options = options
        self._table = normalise_table(options)
        self.kernels: PixelKernels | None = None

    @cached_property
    def _grouped_table(self) -> np.ndarray:
        return grouped_table(self._table, self._options.patch_size)

    def use_kernels(self, kernels: PixelKernels) -> None:
        """See MediaProcessor."""
        self.kernels = kernels

    def rows(self, pixels: np.ndarray) -> np.ndarray:
        """Turns uint8 [H, W, 3] into float32 [N, 3 * T * P * P]; the image is used as T frames.

        Raises ValueError where height or width is no multiple of options.factor.
        """
        options, (height, width) = self._options, pixels.shape[:2]
        if height % options.factor or width % options.factor:
            raise ValueError(
                f"{height} x {width} pixels are no multiple of patch_size * merge_size = "
                f"{options.factor}; resize them first"
            )
        num_patches = pixels.shape[0] * pixels.shape[1] // options.patch_size**2
        row_size = 3 * options.temporal_patch_size * options.patch_size**2
        out = np.empty((num_patches, row_size), dtype=np.float32)
        self.fill([pixels], out)
        return out

    def fill(self, frames: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Writes the patch rows of T frames of uint8 [H, W, 3], or of one that is used T times,
        to `out`, contiguous float32 [N, 3 * T * P * P]."""
        if self.kernels is None:
            patchify_group(frames, self._grouped_table, self._options, out=out)
            return
        size, num_frames = self._options.patch_size, self._options.temporal_patch_size
        rows = torch.from_numpy(out).view(-1, 3, num_frames, size, size)
        is_still = len(frames) == 1
        for index, frame in enumerate(frames):
            self.kernels.patchify(
                torch.from_numpy(np.ascontiguousarray(frame)),
                torch.from_numpy(self._table),
                rows,
                patch_size=size,
                merge_size=self._options.merge_size,
                frames=range(num_frames) if is_still else range(index, index + 1),
            )


def patchify_group(
    frames: Sequence[np.ndarray], table: np.ndarray, options: PatchOptions, *, out: np.ndarray
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


def _patch_rows(pixels: np.ndarray, options: PatchOptions) -> Iterator[np.ndarray]:
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
