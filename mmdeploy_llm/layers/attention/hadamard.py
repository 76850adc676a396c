"""HadamardAttention: attention whose keys and values are moved, scaled and rotated before a cache
of integers stores them, so that no channel of a head needs a range that is too wide for the others.

    k ── minus the mean key, / s ── H ──┐
    q ── * s ─────────────────────── H ─┼── any backend, its cache ── H ── result
    v ────────────────────────────── H ─┘

What attention gives does not change, apart from rounding. H, a Hadamard matrix over blocks of
channels, is its own inverse, and like s it leaves products of q and k as they are. The mean key
changes all scores of a query alike, which the softmax does not see; layers with a soft cap or with
sinks, where it would, keep theirs. Means and s, the root of the deviations of keys over those of
queries, are measured while an engine starts: see `measuring`. Rotations are from QuaRot
(arXiv:2404.00456), the mean key from SageAttention (arXiv:2410.02367).

Shapes: T tokens, H query heads, K key heads, D head size, b channels of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.caches import LayerCache, PagedKV, SharedKV
from mmdeploy_llm.forward import Alibi, AttentionContext
from mmdeploy_llm.hooks.objects.attention import AttentionBackend, BatchLayout, KVCache
from mmdeploy_llm.kernels import Kernels
from mmdeploy_llm.kernels.plain import hadamard
from mmdeploy_llm.layers.basic.recordings import frame_of

LEAST = 1e-3  # the smallest deviation of a channel, as a part of their mean


class HadamardAttention(AttentionBackend):
    """Computes attention by another backend, on heads that few bits hold better. layers: of the
    model, in order."""

    def __init__(
        self,
        inner: AttentionBackend,
        kernels: Kernels,
        layers: Sequence[LayerCache],
        device: torch.device,
    ) -> None:
        self._inner = inner
        self.name, self.can_capture = inner.name, inner.can_capture
        self.kernels = kernels
        self.heads = _heads_of(layers, device)
        paged = [layer for layer in layers if isinstance(layer, PagedKV)]
        sizes = {size for own in paged for size in (own.head_dim, own.value_dim or own.head_dim)}
        self.matrices = {size: hadamard(size).to(device) for size in sizes}
        self.is_measuring = False

    def begin(self, layout: BatchLayout, cache: KVCache) -> HadamardContext:
        """Returns the attention of one step."""
        return HadamardContext(self, self._inner.begin(layout, cache))

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Keys and queries of the steps within it set the means and scales of later ones, so that
        nothing in the cache may be older than its end."""
        self.is_measuring = True
        try:
            yield
        finally:
            self.is_measuring = False
        for heads in self.heads.values():
            heads.settle()


@dataclass(slots=True, eq=False)
class Heads:
    """Holds what moves and multiplies the heads of a layer, [K, D] float32, at addresses that stay
    the same: recorded steps read them."""

    centres: Tensor
    key_factors: Tensor
    query_factors: Tensor
    can_move: bool = True
    sums: list[Tensor] = field(default_factory=list)  # of k, k * k and q * q, each [K, D]
    num_keys: int = 0

    def count(self, q: Tensor, k: Tensor, *, can_move: bool) -> None:
        """Counts queries [T, H, D] and keys [T, K, D], before anything is done to them."""
        keys, queries = k.float(), q.float().view(len(q), k.shape[1], -1, q.shape[-1])
        own = [keys.sum(0), keys.square().sum(0), queries.square().mean(2).sum(0)]
        known = self.sums or [torch.zeros_like(self.centres)] * len(own)
        self.sums = [sum_ + more for sum_, more in zip(known, own, strict=True)]
        self.num_keys += len(k)
        self.can_move &= can_move

    def settle(self) -> None:
        """Takes what was counted since the last call, if that is more than a key and all of it is
        finite."""
        sums, num_keys, self.sums, self.num_keys = self.sums, self.num_keys, [], 0
        if num_keys < 2 or not all(own.isfinite().all() for own in sums):
            return
        mean, square, queries = (own / num_keys for own in sums)
        deviation = _at_least_some((square - mean.square()).clamp_min(0).sqrt())
        scales = (deviation / _at_least_some(queries.sqrt())).sqrt()
        if self.can_move:
            self.centres.copy_(mean)
        self.key_factors.copy_(1 / scales)
        self.query_factors.copy_(scales)


def _at_least_some(x: Tensor) -> Tensor:
    """Returns deviations [K, D], none of which is nothing."""
    return x.maximum(LEAST * x.mean(-1, keepdim=True)).clamp_min(1e-12)


def _heads_of(layers: Sequence[LayerCache], device: torch.device) -> dict[int, Heads]:
    """Returns the heads of each layer with keys; layers that share keys share them."""
    found = dict[int, Heads]()
    for index, layer in enumerate(layers):
        if isinstance(layer, SharedKV):
            found[index] = found[layer.layer]
        elif isinstance(layer, PagedKV):
            size = layer.num_kv_heads, layer.head_dim
            zeros, ones = (make(size, device=device) for make in (torch.zeros, torch.ones))
            found[index] = Heads(centres=zeros, key_factors=ones, query_factors=ones.clone())
    return found


class HadamardContext:
    """Computes the attention of one step."""

    def __init__(self, backend: HadamardAttention, inner: AttentionContext) -> None:
        self._backend, self._inner = backend, inner
        self.frame = frame_of(inner)

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
        backend, heads = self._backend, self._backend.heads[layer]
        if backend.is_measuring and k is not None:
            heads.count(q, k, can_move=softcap is None and sinks is None)
        mix, matrices = backend.kernels.mix_heads, backend.matrices
        q = mix(q, matrices[q.shape[-1]], None, heads.query_factors)
        if k is not None and v is not None:
            k = mix(k, matrices[k.shape[-1]], heads.centres, heads.key_factors)
            v = mix(v, matrices[v.shape[-1]])
        options: Any = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
        options |= {} if alibi is None else {"alibi": alibi}  # which few backends take
        out = self._inner.attend(layer, q, k, v, **options)
        return mix(out, matrices[out.shape[-1]])

    def causal(self) -> AttentionContext:
        """See forward.AttentionContext."""
        inner = self._inner.causal()
        return self if inner is self._inner else HadamardContext(self._backend, inner)
