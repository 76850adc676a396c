"""Writes a step's keys and values to the cache: in plain torch, or with a Triton kernel."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from mmdeploy_llm.forward import QKRotary
from mmdeploy_llm.hooks.objects.attention import BatchLayout


class CacheWriter(Protocol):
    """Writes `k`, `v` [T, K, D] to `keys`, `values` [N, P, K, D] at layout.slots, in the cache's
    dtype; skips padding rows. Scales: see KVCache."""

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
        """Writes one layer of one step."""


def write_plain(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: BatchLayout,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Writes keys and values in plain torch, to caches without scales; a CacheWriter."""
    assert key_scales is value_scales is None, "only kernels write scales"
    slots = layout.slots
    if layout.is_padded:
        # A padding row writes the first row again, to the first row's slot: a graph cannot branch.
        # In a batch of padding alone (warm-up) that is slot 0.
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
    rotary: QKRotary | None = None,
) -> None:
    """Writes keys and values with one launch of a Triton kernel; a CacheWriter. Needs triton.
    rotary: applied by the same launch to `k` before it is written, and to `q` [T, H, D] in
    place."""
    from mmdeploy_llm.kernels.cuda.heads import write_cache

    write_cache(k, v, keys, values, layout.slots, key_scales, value_scales, q=q, rotary=rotary)
