"""Reads of one rank: the part of a checkpoint's tensor that fills its share of a parameter.

What is divided by rows is read as it lies in the file. Of what is divided by columns whole rows are
read, a few at a time, and the columns taken: the host reads each page of the file once for all
ranks, and no rank ever holds more than its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.parallel import Share

from .files import STAGING_BYTES, SafetensorsFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One read: values of `key` into values `start` .. `start + size` of parameter `name`.

    shape: of these values in the parameter; first_value: where they begin in the file's tensor;
    transpose: the file holds the last two axes swapped.
    """

    file: SafetensorsFile
    key: str
    name: str
    start: int
    shape: tuple[int, ...]
    first_value: int
    transpose: bool

    @property
    def size(self) -> int:
        """How many values."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """What a share has of a read: `size` values of the read's axis `axis` from `first` on; negative
    axes have it whole. place: their index in the share."""

    axis: int
    first: int
    size: int
    place: tuple[Any, ...]


def fill(read: Read, param: Tensor) -> None:
    """Carries the read out, into the whole contiguous parameter."""
    out = param.view(-1)[read.start : read.start + read.size].view(read.shape)
    read.file.read_into(read.key, out, first_value=read.first_value, transpose=read.transpose)


def fill_share(read: Read, param: Tensor, share: Share, whole: Sequence[int]) -> None:
    """As `fill`, into the share of a parameter whose shape is `whole`; reads nothing that the share
    does not have, but columns beside those it has."""
    for part in _parts(read, share, whole):
        out = param[part.place]
        if part.axis < 0 or (part.axis == 0 and _is_in_rows(read)):
            values = part.first * math.prod(read.shape[1:]) if part.axis == 0 else 0
            read.file.read_into(
                read.key, out, first_value=read.first_value + values, transpose=read.transpose
            )
        else:
            _fill_columns(read, out, part)


def _is_in_rows(read: Read) -> bool:
    """Whether the values of a row lie together in the file."""
    return not (read.transpose and len(read.shape) == 2)


def _parts(read: Read, share: Share, whole: Sequence[int]) -> Iterator[_Part]:
    num_fixed = len(whole) - len(read.shape)  # leading axes of which the read has one index
    origin = [int(at) for at in np.unravel_index(read.start, tuple(whole))]
    axis = share.axis - num_fixed
    begin = origin[share.axis]
    end = begin + (read.shape[axis] if axis >= 0 else 1)
    place: list[Any] = [*origin[:num_fixed], *(slice(None) for _ in read.shape)]
    if read.shape:
        place[num_fixed] = slice(origin[num_fixed], origin[num_fixed] + read.shape[0])
    held = 0
    for first, stop in share.ranges:
        low, high = max(begin, first), min(end, stop)
        if low < high:
            start = held + low - first
            place[share.axis] = slice(start, start + high - low) if axis >= 0 else start
            yield _Part(axis=axis, first=low - begin, size=high - low, place=tuple(place))
        held += stop - first


def _fill_columns(read: Read, out: Tensor, part: _Part) -> None:
    """By way of a buffer of whole rows; of the whole matrix where the file has it transposed."""
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
        taken = buffer.narrow(part.axis, part.first, part.size)
        (out if part.axis == 0 else out[row : row + step]).copy_(taken)
