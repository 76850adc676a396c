"""How a step's keys and values get into the cache: in plain torch, or by a kernel of the device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mmdeploy_llm.forward import HeadTurn

from .base import BatchLayout


class CacheWriter(Protocol):
    """Writes `k`, `v` [T, K, D] to `keys`, `values` [N, P, K, D] at layout.slots, in the cache's
    dtype; rows of padding go nowhere. scales: of 8-bit caches, [N, P, K] float32."""

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: BatchLayout,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        """One layer of one step."""
        ...


def write_plain(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: BatchLayout,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """In plain torch, for caches without scales; a CacheWriter."""
    assert key_scales is value_scales is None, "select sees to it"
    slots = layout.slots
    if layout.is_padded:
        # Padding writes the first row once more, to its own place: no branch that a graph would
        # not have. In a batch of padding alone, which is the warm-up's, that is a place of block 0.
        is_real = slots >= 0
        k, v = (torch.where(is_real[:, None, None], x, x[:1]) for x in (k, v))
        slots = torch.where(is_real, slots, slots[0].clamp(min=0))
    keys.flatten(0, 1).index_copy_(0, slots, k.to(keys.dtype))
    values.flatten(0, 1).index_copy_(0, slots, v.to(values.dtype))


def write_by_kernel(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: BatchLayout,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    q: Tensor | None = None,
    turn: HeadTurn | None = None,
) -> None:
    """By a Triton kernel, keys and values in one launch; a CacheWriter. Needs triton. turn: what
    the same launch does to `k`, and to `q` [T, H, D] in place."""
    from mmdeploy_llm.cuda.heads import write_cache

    write_cache(k, v, keys, values, layout.slots, key_scales, value_scales, q=q, turn=turn)
