"""The CPU backend on the C++ kernels: one call for prefill chunks and decode tokens together."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.native import Kernels, Sequences

from .base import BatchLayout, KVCache
from .layouts import places_of, visible_ranges

BLOCK_STEP = 64  # block tables of a frame grow by so many


class NativeAttention:
    """Reads keys and values where they lie in their pages. float32 and bf16, with a cache of the
    same dtype or of int8."""

    name = "native"
    can_capture = False

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._frames: dict[int, NativeFrame] = {}  # by number of sequences

    def begin(self, layout: BatchLayout, cache: KVCache) -> NativeContext:
        """What sequences see in the step, made once for all layers of a window."""
        num_sequences = len(layout.query_lens)
        if layout.num_decode < num_sequences or layout.spans:
            return NativeContext(self._kernels, cache, layout.slots, _Ranges(layout), None)
        frame = self._frames.get(num_sequences)
        if frame is None or not frame.has_room(layout, cache):
            frame = self._frames[num_sequences] = NativeFrame(layout, cache)
        frame.update(layout)
        return NativeContext(self._kernels, cache, frame.slots, frame, frame)


class NativeFrame:
    """What a decode step of B sequences tells the kernels, always in the same memory."""

    def __init__(self, layout: BatchLayout, cache: KVCache) -> None:
        num_sequences, num_blocks = layout.block_tables.shape
        self._cache = cache
        self._max_blocks = -(-num_blocks // BLOCK_STEP) * BLOCK_STEP
        self.slots = torch.empty(num_sequences, dtype=torch.int64)
        self._behind = np.empty(num_sequences, dtype=np.int64)
        self._tables = torch.zeros(num_sequences, self._max_blocks, dtype=torch.int32)
        self._starts = torch.arange(num_sequences + 1)
        self._sequences: dict[int | None, Sequences] = {}  # by window

    def has_room(self, layout: BatchLayout, cache: KVCache) -> bool:
        """Whether `update` takes a step of as many sequences in `cache`."""
        return cache is self._cache and layout.block_tables.shape[1] <= self._max_blocks

    def update(self, layout: BatchLayout) -> None:
        """Takes over the lengths, tables and slots of a step."""
        self.slots.copy_(layout.slots)
        self._behind[:] = layout.context_lens
        self._tables[:, : layout.block_tables.shape[1]] = layout.block_tables
        for window, sequences in self._sequences.items():
            self._set_first(window, sequences)

    def sequences(self, window: int | None) -> Sequences:
        """What the tokens see of their sequences."""
        if window not in self._sequences:
            sequences = Sequences(
                query_starts=self._starts,
                first_seen=torch.from_numpy(np.zeros_like(self._behind)),
                behind_seen=torch.from_numpy(self._behind),
                block_tables=self._tables,
            )
            self._set_first(window, sequences)
            self._sequences[window] = sequences
        return self._sequences[window]

    def _set_first(self, window: int | None, sequences: Sequences) -> None:
        if window is not None:
            np.maximum(self._behind - window, 0, out=sequences.first_seen.numpy())


class _Ranges:
    """What the tokens of any step see."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._starts, self._places = places_of(layout)
        self._sequences: dict[int | None, Sequences] = {}  # by window

    def sequences(self, window: int | None) -> Sequences:
        """What the tokens see of their sequences."""
        if window not in self._sequences:
            self._sequences[window] = self._ranges(window)
        return self._sequences[window]

    def _ranges(self, window: int | None) -> Sequences:
        first, behind = visible_ranges(self._layout, self._starts, self._places, window)
        return Sequences(
            query_starts=torch.from_numpy(self._starts),
            first_seen=torch.from_numpy(first),
            behind_seen=torch.from_numpy(behind),
            block_tables=self._layout.block_tables,
        )


class NativeContext:
    """Attention of one step."""

    def __init__(
        self,
        kernels: Kernels,
        cache: KVCache,
        slots: Tensor,
        seen: _Ranges | NativeFrame,
        frame: NativeFrame | None,
    ) -> None:
        """frame: see forward.FixedAttention."""
        self._kernels = kernels
        self._cache = cache
        self._slots = slots
        self._seen = seen
        self.frame = frame

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
        cache, slots = self._cache, self._slots
        keys, values = cache.keys[layer], cache.values[layer]
        key_scales, value_scales = cache.scales(layer)
        q, k, v = (_with_heads_side_by_side(x) for x in (q, k, v))
        self._kernels.write_cache(k, keys, slots, key_scales)
        self._kernels.write_cache(v, values, slots, value_scales)
        return self._kernels.attend(
            q,
            keys,
            values,
            self._seen.sequences(window),
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            softcap=softcap,
            key_scales=key_scales,
            value_scales=value_scales,
        )


def _with_heads_side_by_side(x: Tensor) -> Tensor:
    """`x` [T, heads, D] as the kernels read it: any stride from token to token."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
