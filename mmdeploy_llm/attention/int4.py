"""Stores keys and values in 4 bits, in plain torch; the C++ kernels give the same bits.

The channels of a head are divided into groups of GROUP_CHANNELS; a head whose size is no multiple
of it is one group. A group has a scale and a lowest value in bf16, which takes half of float32's
memory and, unlike float16, holds every key that a model in bf16 can have; a channel is lowest +
code * scale, with a code from 0 to 15. With 64 channels that is 4.5 bits a value.

    codes    [..., D / 2] uint8       byte i of a group: channel i in the low bits, and in the
                                      others the channel that is half a group after it
    scales   [..., groups, 2] bf16    scale, lowest value
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_CHANNELS = 64  # as in int4.h of the kernels
LARGEST = 15


def num_groups(head_dim: int) -> int:
    """Returns the number of groups of a head, whose size must be even."""
    assert head_dim % 2 == 0, "two codes are a byte"
    return head_dim // GROUP_CHANNELS if head_dim % GROUP_CHANNELS == 0 else 1


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of heads [..., D]. A value that is not finite makes all of its
    group NaN when it is decoded."""
    groups = x.float().unflatten(-1, (num_groups(x.shape[-1]), -1))
    lowest = groups.amin(-1, keepdim=True).bfloat16()
    scale = ((groups.amax(-1, keepdim=True) - lowest) / LARGEST).bfloat16()
    codes = ((groups - lowest) / scale).nan_to_num(0.0).clamp(0, LARGEST).add(0.5).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return (low | high << 4).flatten(-2), torch.cat((scale, lowest), -1)


def write(x: Tensor, cache: Tensor, scales: Tensor, slots: Tensor) -> None:
    """Writes heads [T, K, D] to their slots [T] of `cache` [N, P, K, D / 2]."""
    assert cache.dtype is torch.uint8, "select() allows no 8-bit cache here"
    for pages, rows in zip((cache, scales), encode(x), strict=True):
        pages.flatten(0, 1).index_copy_(0, slots, rows)


def read(cache: Tensor, scales: Tensor, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the heads in the blocks `table` [M] of `cache`, [M * P, K, D] in `dtype`."""
    codes, facts = (x.index_select(0, table).flatten(0, 1) for x in (cache, scales))
    return decode(codes, facts, dtype)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the heads [..., D] in `dtype`."""
    pairs = codes.unflatten(-1, (scales.shape[-2], -1))
    values = torch.cat((pairs & LARGEST, pairs >> 4), -1).float()
    scale, lowest = scales.float().split(1, -1)
    return (lowest + values * scale).flatten(-2).to(dtype)
