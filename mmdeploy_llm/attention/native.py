"""The CPU backend on the C++ kernels: one call for prefill chunks and decode tokens together.

What a token sees is a range of its sequence's keys, whatever the reason: causal attention and
windows, and the whole of its own media item where media are atomic.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.native import Kernels, Sequences

from .base import BatchLayout, KVCache

Ints = NDArray[np.int64]


class NativeAttention:
    """Reads keys and values where they lie in their pages. float32 and bf16, with a cache of the
    same dtype or of int8."""

    name = "native"
    can_capture = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def begin(self, layout: BatchLayout, cache: KVCache) -> NativeContext:
        """Ranges of the step, made once for all layers of a window."""
        return NativeContext(self._kernels, layout, cache)


class NativeContext:
    """Attention of one step."""

    def __init__(self, kernels: Kernels, layout: BatchLayout, cache: KVCache) -> None:
        self._kernels = kernels
        self._cache = cache
        self._layout = layout
        self._starts = np.array([0, *accumulate(layout.query_lens)], dtype=np.int64)
        before = np.array(layout.context_lens) - np.array(layout.query_lens) - self._starts[:-1]
        counts = np.array(layout.query_lens)
        self._places = np.arange(self._starts[-1]) + np.repeat(before, counts)  # [T]
        self._sequences: dict[int | None, Sequences] = {}  # by window

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """`q` [T, H, D], `k` and `v` [T, K, D] -> [T, H, D]; see forward.AttentionContext."""
        cache, slots = self._cache, self._layout.slots
        keys, values = cache.keys[layer], cache.values[layer]
        key_scales = None if cache.key_scales is None else cache.key_scales[layer]
        value_scales = None if cache.value_scales is None else cache.value_scales[layer]
        q, k, v = (_with_heads_side_by_side(x) for x in (q, k, v))
        self._kernels.write_cache(k, keys, slots, key_scales)
        self._kernels.write_cache(v, values, slots, value_scales)
        if window not in self._sequences:
            self._sequences[window] = self._ranges(window)
        return self._kernels.attend(
            q,
            keys,
            values,
            self._sequences[window],
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            softcap=softcap,
            key_scales=key_scales,
            value_scales=value_scales,
        )

    def _ranges(self, window: int | None) -> Sequences:
        behind = self._places + 1
        first = np.zeros_like(behind) if window is None else np.maximum(behind - window, 0)
        for sequence, start, end in self._layout.spans:
            begin = self._starts[sequence]
            own = self._places[begin : self._starts[sequence + 1]]
            rows = begin + np.flatnonzero((own >= start) & (own < end))
            first[rows] = np.minimum(first[rows], start)
            behind[rows] = end
        return Sequences(
            query_starts=torch.from_numpy(self._starts),
            first_seen=torch.from_numpy(first),
            behind_seen=torch.from_numpy(behind),
            block_tables=self._layout.block_tables,
        )


def _with_heads_side_by_side(x: Tensor) -> Tensor:
    """`x` [T, heads, D] as the kernels read it: any stride from token to token."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
