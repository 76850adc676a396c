"""Attention in both directions over the whole prompts of a step, packed one after another; nothing
is kept.

    rows of the step   [ a a a a | b b | c c c c c ]     each attends to its own prompt

Shapes: T tokens of the step, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.forward import Alibi, AttentionContext
from mmdeploy_llm.hooks.objects.attention import (
    AttentionBackend,
    AttentionKernels,
    BatchLayout,
    KVCache,
    VisibleKeys,
)

from .scores import Scores


class PackedAttention(AttentionBackend):
    """Serves models that attend in both directions; see hooks.Model."""

    name = "packed"
    can_capture = False

    def __init__(self, kernels: AttentionKernels | None = None) -> None:
        """kernels: compute what they can; None: all is plain torch."""
        self._kernels = kernels

    def begin(self, layout: BatchLayout, cache: KVCache) -> PackedContext:
        """Returns the attention of a step, whose sequences are whole."""
        assert layout.query_lens == layout.context_lens, "prompts are computed in one step"
        return PackedContext(layout.query_lens, self._kernels)


class PackedContext:
    """Computes the attention of one step."""

    def __init__(self, lengths: tuple[int, ...], kernels: AttentionKernels | None) -> None:
        self._lengths, self._kernels = lengths, kernels
        self._visible: dict[int | None, VisibleKeys] = {}  # by window

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
        """Returns attention of `q` [T, H, D] over `k`, `v` [T, K, D] as [T, H, D]; see
        forward.AttentionContext. window: a token attends to window // 2 tokens on each side."""
        assert k is not None, "no layer has the keys of another"
        assert v is not None, "no layer has the values of another"
        assert alibi is None, "biases by the index of a key alone are of causal attention"
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self._kernels is not None and self._kernels.can_attend(q, k, v):
            visible = self._for_window(window)
            options = {"scale": scale, "softcap": softcap, "sinks": sinks}
            return self._kernels.attend(q, k, v, visible, **options)  # type: ignore[arg-type]
        scores = Scores(scale=scale, softcap=softcap, sinks=sinks).viewed(-1, 1, 1)
        starts = accumulate(self._lengths, initial=0)
        parts = (_attend(q[a:b], k[a:b], v[a:b], window, scores) for a, b in pairwise(starts))
        return torch.cat(list(parts))

    def causal(self) -> AttentionContext:
        """Raises ModelNotSupportedError; see forward.AttentionContext."""
        raise ModelNotSupportedError(
            "a model that is_bidirectional has no causal attention in some of its layers"
        )

    def _for_window(self, window: int | None) -> VisibleKeys:
        """Returns the keys that each token attends to, shared by all layers of this window."""
        if window not in self._visible:
            counts = np.array(self._lengths, dtype=np.int64)
            starts = np.concatenate(([0], counts.cumsum()))
            ends = np.repeat(counts, counts)
            first = np.zeros_like(ends)
            if window is not None:
                places = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
                first = np.maximum(places - window // 2, 0)
                ends = np.minimum(places + window // 2 + 1, ends)
            arrays = (torch.from_numpy(each) for each in (starts, first, ends))
            self._visible[window] = _keys(*arrays)
        return self._visible[window]


def _keys(starts: Tensor, first: Tensor, ends: Tensor) -> VisibleKeys:
    return VisibleKeys(query_starts=starts, first_visible=first, end_visible=ends)


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, scores: Scores) -> Tensor:
    """Computes the attention of one prompt in plain torch."""
    length, group = len(q), q.shape[1] // k.shape[1]
    mask = None
    if window is not None and window // 2 < length - 1:
        places = torch.arange(length, device=q.device)
        mask = (places[:, None] - places).abs() <= window // 2
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    return scores.attend(q.transpose(0, 1), k, v, mask).transpose(0, 1)
