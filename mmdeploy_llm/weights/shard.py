"""Reads one rank's shard of a checkpoint.

A shard by rows is contiguous in the file and read directly. For a shard by columns, whole rows are
read into a buffer, from which the columns are copied. The ranks share the host's page cache, so
each page of the file is read from disk once; no rank holds more than its shard and the buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.system.sharding import Share
from mmdeploy_llm.weights.tensor_file import TensorFile

from .files import STAGING_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One read: fills values `start` .. `start + size` of parameter `name` from tensor `key`.

    shape: shape of these values in the parameter.
    first_value: index of the first value in the file's tensor.
    transpose: whether the file stores the last two axes swapped.
    """

    file: TensorFile
    key: str
    name: str
    start: int
    shape: tuple[int, ...]
    first_value: int
    transpose: bool

    @property
    def size(self) -> int:
        """Number of values that the read fills."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overlap:
    """The values that a share and a read have in common.

    axis, first, size: indices `first` .. `first + size` of the read's axis; a negative axis means
        the whole read.
    index: index of these values in the shard.
    """

    axis: int
    first: int
    size: int
    index: tuple[Any, ...]


def fill(read: Read, param: Tensor) -> None:
    """Reads the values into a whole, contiguous parameter."""
    out = param.view(-1)[read.start : read.start + read.size].view(read.shape)
    read.file.read_into(read.key, out, first_value=read.first_value, transpose=read.transpose)


def fill_share(read: Read, param: Tensor, share: Share, whole: Sequence[int]) -> None:
    """Reads the values that the shard `param` of a parameter of shape `whole` holds, and no others;
    for a shard by columns, whole rows are read into a buffer."""
    for common in _overlaps(read, share, whole):
        out = param[common.index]
        if common.axis < 0 or (common.axis == 0 and _is_in_rows(read)):
            values = common.first * math.prod(read.shape[1:]) if common.axis == 0 else 0
            read.file.read_into(
                read.key, out, first_value=read.first_value + values, transpose=read.transpose
            )
        else:
            _fill_columns(read, out, common)


def _is_in_rows(read: Read) -> bool:
    """Returns whether the values of a row are contiguous in the file."""
    return not (read.transpose and len(read.shape) == 2)


def _overlaps(read: Read, share: Share, whole: Sequence[int]) -> Iterator[_Overlap]:
    num_fixed = len(whole) - len(read.shape)  # leading axes on which the read has a single index
    origin = [int(at) for at in np.unravel_index(read.start, tuple(whole))]
    axis = share.axis - num_fixed
    begin = origin[share.axis]
    end = begin + (read.shape[axis] if axis >= 0 else 1)
    index: list[Any] = [*origin[:num_fixed], *(slice(None) for _ in read.shape)]
    if read.shape:
        index[num_fixed] = slice(origin[num_fixed], origin[num_fixed] + read.shape[0])
    held = 0
    for first, stop in share.ranges:
        low, high = max(begin, first), min(end, stop)
        if low < high:
            start = held + low - first
            index[share.axis] = slice(start, start + high - low) if axis >= 0 else start
            yield _Overlap(axis=axis, first=low - begin, size=high - low, index=tuple(index))
        held += stop - first


def _fill_columns(read: Read, out: Tensor, common: _Overlap) -> None:
    """Reads columns through a buffer of whole rows, or of the whole matrix if the file transposes
    it."""
    dtype = read.file.entries[read.key].dtype
    num_rows, row_size = read.shape[0], math.prod(read.shape[1:])
    step = max(1, STAGING_BYTES // (row_size * dtype.itemsize))
    if not _is_in_rows(read):
        step = num_rows
    for row in range(0, num_rows, step):
        shape = (min(step, num_rows - row), *read.shape[1:])
        buffer = torch.empty(shape, dtype=dtype)
        first_value = read.first_value + row * row_size
        read.file.read_into(read.key, buffer, first_value=first_value, transpose=read.transpose)
        values = buffer.narrow(common.axis, common.first, common.size)
        (out if common.axis == 0 else out[row : row + step]).copy_(values)
