"""Stores keys and values in 4 bits, in plain torch; the C++ kernels give the same bits.

The channels of a head are divided into groups of GROUP_CHANNELS; a head whose size is no multiple
of it is one group. A group has a scale and a lowest value in bf16, which takes half of float32's
memory and, unlike float16, holds every key that a model in bf16 can have; a channel is lowest +
code * scale, with a code from 0 to 15: 5 bits a value. hadamard.py prepares heads for that.

    codes    [..., D / 2] uint8       byte i of a group: channel i in the low bits, and in the
                                      others the channel that is half a group after it
    scales   [..., groups, 2] bf16    scale, lowest value
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from mmdeploy_llm.forward import Alibi, AttentionContext
from mmdeploy_llm.hooks.objects.attention import BatchLayout, KVCache

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
GROUP_CHANNELS = 32  # as in kernels/cpp/layers/int4.h
LARGEST = 15


def num_groups(head_dim: int) -> int:
    """Returns the number of groups of a head, whose size must be even."""
    assert head_dim % 2 == 0, "two codes are a byte"
    return head_dim // GROUP_CHANNELS if head_dim % GROUP_CHANNELS == 0 else 1


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes and scales of heads [..., D]. A value that is not finite makes all of its
    group NaN when it is decoded."""
    groups = x.float().reshape(*x.shape[:-1], num_groups(x.shape[-1]), -1)
    lowest = groups.amin(-1, keepdim=True).bfloat16()
    scale = ((groups.amax(-1, keepdim=True) - lowest) / LARGEST).bfloat16()
    codes = ((groups - lowest) / scale).nan_to_num(0.0).clamp(0, LARGEST).add(0.5).to(torch.uint8)
    low, high = codes.chunk(2, -1)
    return (low | high << 4).flatten(-2), torch.cat((scale, lowest), -1)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the heads [..., D] in `dtype`."""
    pairs = codes.reshape(*scales.shape[:-1], -1)
    values = torch.cat((pairs & LARGEST, pairs >> 4), -1).float()
    scale, lowest = scales[..., :1].float(), scales[..., 1:].float()
    return (lowest + values * scale).flatten(-2).to(dtype)


class Int4Context:
    """Computes the attention of one step over a cache in 4 bits: decodes the blocks of the step's
    sequences, one layer at a time, and attends over these.

    begin: returns the attention over a cache in the dtype of the queries.
    """

    def __init__(
        self,
        layout: BatchLayout,
        cache: KVCache,
        begin: Callable[[BatchLayout, KVCache], AttentionContext],
    ) -> None:
        self._layout = layout
        self._cache = cache
        self._begin = begin

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi: Alibi | None = None,
    ) -> Tensor:
        """See forward.AttentionContext."""
        cache, tables, found = self._cache, self._layout.block_tables, []
        for pages, scales, rows in zip(
            (cache.keys[layer], cache.values[layer]), cache.scales(layer), (k, v), strict=True
        ):
            assert pages.dtype is torch.uint8, "select() allows no 8-bit cache here"
            assert scales is not None, "4 bits have scales"
            if rows is not None:
                for stored, new in zip((pages, scales), encode(rows), strict=True):
                    stored.flatten(0, 1).index_copy_(0, self._layout.slots, new)
            codes, ranges = (x.index_select(0, tables.flatten()) for x in (pages, scales))
            found.append(decode(codes, ranges, q.dtype))
        places = torch.arange(tables.numel(), dtype=tables.dtype, device=tables.device)
        context = self._begin(
            replace(self._layout, block_tables=places.view_as(tables)),
            KVCache(keys=(found[0],), values=(found[1],)),
        )
        return context.attend(
            0, q, None, None, scale=scale, window=window, softcap=softcap, sinks=sinks, alibi=alibi
        )

    def causal(self) -> AttentionContext:
        """See forward.AttentionContext."""
        return Int4Context(replace(self._layout, spans=()), self._cache, self._begin)
