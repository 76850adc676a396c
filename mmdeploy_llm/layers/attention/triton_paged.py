"""The backend with our own Triton kernels: any block size, caches of few bits, windows, softcap and
atomic media. A token attends to a range of its sequence's keys, as on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmdeploy_llm.forward import Alibi, AttentionContext, QKRotary
from mmdeploy_llm.hooks.objects.attention import BatchLayout, KVCache, without_spans
from mmdeploy_llm.layers.transfer import to_device

from . import libraries
from .layouts import lengths_of, positions_of, visible_ranges
from .varlen import Call, Options, VarlenBackend, refuse_alibi
from .writing import write_by_kernel

if TYPE_CHECKING:
    from types import ModuleType

    from mmdeploy_llm.kernels.cuda.paged import Gpu, Pages, Scores, Sequences

Ranges = tuple[Tensor, Tensor]  # first visible key and end of the range: [T] int32 each


class TritonAttention(VarlenBackend):
    """Calls our Triton kernels. gpu: properties that set launch sizes; None: read from `device`.
    Raises ConfigError when triton is not installed."""

    name = "triton"
    has_sinks = True

    def __init__(self, device: torch.device, gpu: Gpu | None = None) -> None:
        libraries.load(self.name)
        from mmdeploy_llm.kernels.cuda import paged

        super().__init__(write_by_kernel)
        self.paged: ModuleType = paged
        self.gpu: Gpu = gpu or paged.gpu_of(device)

    def begin(self, layout: BatchLayout, cache: KVCache) -> TritonContext:
        """Returns the attention of one step."""
        return TritonContext(self, layout, cache)

    def compute(
        self, call: Call, q: Tensor, keys: Tensor, values: Tensor, options: Options
    ) -> Tensor:
        """Computes a decode call for another backend."""
        assert call.is_decode, "other backends compute their own prefill"
        paged, out = self.paged, torch.empty_like(q, memory_format=torch.contiguous_format)
        pages = paged.Pages(keys=keys, values=values, key_scales=None, value_scales=None)
        window = None if options.left is None else options.left + 1
        scores = paged.Scores(
            scale=options.scale, window=window, softcap=options.softcap, sinks=options.sinks
        )
        sequences = paged.Sequences(
            starts=call.starts,
            context_lens=call.context_lens,
            tables=call.tables,
            max_query=1,
            max_context=call.max_context,
        )
        paged.decode(q, out, pages, sequences, scores, self.gpu)
        return out


class TritonContext:
    """Computes the attention of one step."""

    can_rotate = True

    def __init__(self, backend: TritonAttention, layout: BatchLayout, cache: KVCache) -> None:
        self._backend = backend
        self._layout = layout
        self._cache = cache
        self._lengths = lengths_of(layout)
        self._ranges: dict[int | None, Ranges] = {}  # by window

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
        rotary: QKRotary | None = None,
    ) -> Tensor:
        """Stores `k`, `v` [T, K, D] and returns attention of `q` [T, H, D] as [T, H, D]; see
        forward.RotaryAttention."""
        refuse_alibi(layer, alibi, self._backend.name)
        paged, gpu = self._backend.paged, self._backend.gpu
        pages = self._pages(layer)
        if k is not None and v is not None:
            cache = pages.keys, pages.values, self._layout, pages.key_scales, pages.value_scales
            write_by_kernel(k, v, *cache, q=q, rotary=rotary)
        q = q if q.stride(2) == 1 else q.contiguous()
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores: Scores = paged.Scores(scale=scale, window=window, softcap=softcap, sinks=sinks)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_seqs = self._lengths.context_lens.shape[0]
        # With spans a decode token may attend to keys outside its window, which only the prefill
        # kernel computes.
        count = 0 if self._layout.spans else self._layout.num_decode
        if count:
            paged.decode(q, out, pages, self._sequences(slice(0, count), None), scores, gpu)
        if count < num_seqs:
            rest = self._sequences(slice(count, num_seqs), window)
            paged.prefill(q, out, pages, rest, scores, gpu)
        return out

    def causal(self) -> AttentionContext:
        """See forward.AttentionContext."""
        return without_spans(self, self._backend, self._layout, self._cache)

    def _pages(self, layer: int) -> Pages:
        cache = self._cache
        key_scales, value_scales = cache.scales(layer)
        pages: Pages = self._backend.paged.Pages(
            keys=cache.keys[layer],
            values=cache.values[layer],
            key_scales=key_scales,
            value_scales=value_scales,
        )
        return pages

    def _sequences(self, which: slice, window: int | None) -> Sequences:
        lengths = self._lengths
        first, end = self._visible(window) if self._layout.spans else (None, None)
        sequences: Sequences = self._backend.paged.Sequences(
            starts=lengths.query_starts[which.start : which.stop + 1],
            context_lens=lengths.context_lens[which],
            tables=self._layout.block_tables[which],
            max_query=lengths.max_query,
            max_context=lengths.max_context,
            first_visible=first,
            end_visible=end,
        )
        return sequences

    def _visible(self, window: int | None) -> Ranges:
        if window not in self._ranges:
            starts, positions = positions_of(self._layout)
            device = self._layout.slots.device
            first, end = (
                to_device(torch.from_numpy(x).int(), device)
                for x in visible_ranges(self._layout, starts, positions, window)
            )
            self._ranges[window] = first, end
        return self._ranges[window]
