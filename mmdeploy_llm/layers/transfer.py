"""Copies tensors and arrays from the host to a device, without waiting for the device.

On CUDA the copies go through pinned host memory and are ordered in the current stream: work that is
launched later sees them. Small arrays are copied together:

    staging  [ token ids | positions | slots | .. ]   pinned host memory
                |  one copy
    buffer   [ token ids | positions | slots | .. ]   on the device; the tensors are views of it

On a CPU nothing is copied: the tensors share the memory of the arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
ALIGNMENT = 16  # bytes; torch views a slice of a byte buffer only at a multiple of the dtype's size


def to_device(values: Tensor | NDArray[Any], device: torch.device) -> Tensor:
    """Returns the values as a tensor on `device`, without a copy if they are on it already."""
    if not isinstance(values, Tensor):
        values = torch.from_numpy(np.ascontiguousarray(values))
    if values.device.type == device.type:
        return values
    return values.pin_memory().to(device, non_blocking=True)


def to_device_together(arrays: Sequence[Array], device: torch.device) -> tuple[Tensor, ...]:
    """Returns the arrays as tensors on `device`, transferred in one copy."""
    if device.type == "cpu":
        return tuple(to_device(array, device) for array in arrays)
    return pack(arrays, device)


def pack(arrays: Sequence[Array], device: torch.device) -> tuple[Tensor, ...]:
    """Copies the arrays into one buffer on `device`; returns views of it with their shapes and
    dtypes."""
    slices = buffer_slices([(array.shape, _torch_dtype(array.dtype)) for array in arrays])
    staging = staging_buffer(slices[-1].end, device)
    for own, array in zip(slices, arrays, strict=True):
        own.view(staging).numpy()[...] = array
    buffer = staging.to(device, non_blocking=True)
    return tuple(own.view(buffer) for own in slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSlice:
    """The position of a tensor in a buffer of bytes. offset: index of its first byte."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        """Offset of the first byte after the tensor."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        """Returns the tensor inside `buffer`, without a copy."""
        return buffer[self.offset : self.end].view(self.dtype).view(self.shape)


def buffer_slices(
    contents: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> list[BufferSlice]:
    """Lays out tensors of these shapes and dtypes one after the other in one buffer."""
    slices, offset = [], 0
    for shape, dtype in contents:
        own = BufferSlice(offset=offset, shape=shape, dtype=dtype)
        slices.append(own)
        offset = -(-own.end // ALIGNMENT) * ALIGNMENT
    return slices


def staging_buffer(num_bytes: int, device: torch.device) -> Tensor:
    """Returns host memory to copy to `device` from, pinned for CUDA. torch reuses pinned memory
    only after the copies from it are done, so no step overwrites bytes that are being copied."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
