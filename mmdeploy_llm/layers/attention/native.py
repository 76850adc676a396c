"""The CPU backend on the C++ kernels: one call for prefill chunks and decode tokens together."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.forward import Alibi, AttentionContext
from mmdeploy_llm.hooks.objects.attention import (
    AttentionBackend,
    AttentionKernels,
    BatchLayout,
    KVCache,
    VisibleKeys,
    without_spans,
)

from .layouts import positions_of, visible_ranges

BLOCK_STEP = 64  # block tables of a frame grow by this many columns
MAX_QUERY = 8  # tokens of a sequence in a frame: the last one and drafts
MAX_FRAMES = 256  # the frames that were used last


class NativeAttention(AttentionBackend):
    """Reads keys and values directly from their pages. Supports float32 and bf16, with a cache of
    the same dtype, int8 or int4."""

    name = "native"
    can_capture = False

    def __init__(self, kernels: AttentionKernels) -> None:
        self.kernels = kernels
        # By the numbers of sequences and of tokens.
        self._frames: OrderedDict[tuple[int, int], NativeFrame] = OrderedDict()

    def begin(self, layout: BatchLayout, cache: KVCache) -> NativeContext:
        """Prepares the visible keys of the step, shared by all layers with the same window."""
        if layout.spans or max(layout.query_lens) > MAX_QUERY:
            return NativeContext(self, cache, layout, _MixedStep(layout))
        size = len(layout.query_lens), layout.slots.shape[0]
        frame = self._frames.get(size)
        if frame is None or not frame.fits(layout, cache):
            frame = self._frames[size] = NativeFrame(layout, cache)
        self._frames.move_to_end(size)
        if len(self._frames) > MAX_FRAMES:
            self._frames.popitem(last=False)
        frame.update(layout)
        return NativeContext(self, cache, layout, frame)


class NativeFrame:
    """The arguments of steps with B sequences and T tokens, always at the same addresses, so that
    recorded kernel calls read those of later steps."""

    def __init__(self, layout: BatchLayout, cache: KVCache) -> None:
        num_sequences, num_blocks = layout.block_tables.shape
        self._cache = cache
        self._max_blocks = -(-num_blocks // BLOCK_STEP) * BLOCK_STEP
        self.slots = torch.empty_like(layout.slots)
        self._starts = np.empty(num_sequences + 1, dtype=np.int64)
        self._ends = np.empty(len(self.slots), dtype=np.int64)
        self._tables = torch.zeros(num_sequences, self._max_blocks, dtype=torch.int32)
        self._visible: dict[int | None, VisibleKeys] = {}  # by window
        # Their first_visible. Tensor.numpy() while a step is recorded would end the recording.
        self._firsts: dict[int | None, NDArray[np.int64]] = {}

    def fits(self, layout: BatchLayout, cache: KVCache) -> bool:
        """Whether `update` accepts a step of B sequences and T tokens in `cache`."""
        return cache is self._cache and layout.block_tables.shape[1] <= self._max_blocks

    def update(self, layout: BatchLayout) -> None:
        """Copies the lengths, tables and slots of a step into the frame."""
        self.slots.copy_(layout.slots)
        self._starts[:], positions = positions_of(layout)
        self._ends[:] = positions + 1
        self._tables[:, : layout.block_tables.shape[1]] = layout.block_tables
        for window in self._firsts:
            self._set_first(window)

    def visible(self, window: int | None) -> VisibleKeys:
        """Returns the keys that each token attends to."""
        if window not in self._visible:
            first = self._firsts[window] = np.zeros_like(self._ends)
            self._set_first(window)
            self._visible[window] = VisibleKeys(
                query_starts=torch.from_numpy(self._starts),
                first_visible=torch.from_numpy(first),
                end_visible=torch.from_numpy(self._ends),
                block_tables=self._tables,
            )
        return self._visible[window]

    def _set_first(self, window: int | None) -> None:
        if window is not None:
            np.maximum(self._ends - window, 0, out=self._firsts[window])


class _MixedStep:
    """The arguments of a step with prefill chunks or spans."""

    def __init__(self, layout: BatchLayout) -> None:
        self._layout = layout
        self._starts, self._positions = positions_of(layout)
        self._visible: dict[int | None, VisibleKeys] = {}  # by window

    def visible(self, window: int | None) -> VisibleKeys:
        """Returns the keys that each token attends to."""
        if window not in self._visible:
            self._visible[window] = self._ranges(window)
        return self._visible[window]

    def _ranges(self, window: int | None) -> VisibleKeys:
        first, end = visible_ranges(self._layout, self._starts, self._positions, window)
        return VisibleKeys(
            query_starts=torch.from_numpy(self._starts),
            first_visible=torch.from_numpy(first),
            end_visible=torch.from_numpy(end),
            block_tables=self._layout.block_tables,
        )


class NativeContext:
    """Computes the attention of one step."""

    def __init__(
        self,
        backend: NativeAttention,
        cache: KVCache,
        layout: BatchLayout,
        step: _MixedStep | NativeFrame,
    ) -> None:
        self._backend = backend
        self._cache = cache
        self._layout = layout
        self._step = step
        self.frame = step if isinstance(step, NativeFrame) else None  # see FixedAttention

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
        """Stores `k`, `v` [T, K, D] and returns attention of `q` [T, H, D] as [T, H, D]; see
        forward.AttentionContext."""
        cache, kernels = self._cache, self._backend.kernels
        slots = self._layout.slots if self.frame is None else self.frame.slots
        keys, values = cache.keys[layer], cache.values[layer]
        key_scales, value_scales = cache.scales(layer)
        if k is not None and v is not None:
            kernels.write_cache(_with_contiguous_heads(k), keys, slots, key_scales)
            kernels.write_cache(_with_contiguous_heads(v), values, slots, value_scales)
        return kernels.attend(
            q if q.stride(2) == 1 else q.contiguous(),
            keys,
            values,
            self._step.visible(window),
            scale=q.shape[-1] ** -0.5 if scale is None else scale,
            softcap=softcap,
            sinks=sinks,
            alibi=alibi,
            key_scales=key_scales,
            value_scales=value_scales,
        )

    def causal(self) -> AttentionContext:
        """See forward.AttentionContext."""
        return without_spans(self, self._backend, self._layout, self._cache)


def _with_contiguous_heads(x: Tensor) -> Tensor:
    """Returns keys or values [T, K, D] as the kernels read them: only the stride between tokens is
    free."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
