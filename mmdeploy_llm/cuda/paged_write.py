"""Writes a step's keys and values to the paged KV cache, both in one launch, in 8 bits with a scale
for each token and head where the cache is so."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

LARGEST = {1: 127.0, 2: 448.0}  # of int8 and of float8 e4m3
BLOCK_VALUES = 2048  # of keys that one program writes


@triton.jit
def _store(
    source, cache, scales, at, slot, heads, dims, mask, head_stride,
    KIND: tl.constexpr, LARGEST_VALUE: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """KIND: 0 as they are, 1 int8, 2 float8."""
    x = tl.load(source + at + heads[:, None] * head_stride + dims[None, :], mask=mask, other=0.0)
    rows = slot * NUM_HEADS + heads
    if KIND > 0:
        x = x.to(tl.float32)
        factors = tl.maximum(tl.max(tl.abs(x), 1) / LARGEST_VALUE, 1e-12)
        x = x / factors[:, None]
        tl.store(scales + rows, factors, mask=(heads < NUM_HEADS) & (slot >= 0))
    if KIND == 1:
        x = tl.floor(x + 0.5)
    tl.store(cache + rows[:, None] * D + dims[None, :], x.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _write_kernel(
    k, v, keys, values, key_scales, value_scales, slots,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    KIND: tl.constexpr, LARGEST_VALUE: tl.constexpr, NUM_HEADS: tl.constexpr, D: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one token; a token without a slot is not stored."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = ((heads < NUM_HEADS) & (slot >= 0))[:, None] & (dims < D)[None, :]
    _store(
        k, keys, key_scales, token * k_token_stride, slot, heads, dims, mask, k_head_stride,
        KIND, LARGEST_VALUE, NUM_HEADS, D,
    )  # fmt: skip
    _store(
        v, values, value_scales, token * v_token_stride, slot, heads, dims, mask, v_head_stride,
        KIND, LARGEST_VALUE, NUM_HEADS, D,
    )  # fmt: skip


def write_cache(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """`k`, `v` [T, K, D] into the rows `slots` [T] of `keys`, `values` [N, P, K, D], in the cache's
    dtype; scales: [N, P, K] float32, of 8-bit caches. Negative slots are skipped."""
    num_tokens, num_heads, head_dim = k.shape
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    kind = 0 if key_scales is None else 2 if keys.dtype.is_floating_point else 1
    block_d = triton.next_power_of_2(head_dim)
    block_h = min(triton.next_power_of_2(num_heads), max(1, BLOCK_VALUES // block_d))
    _write_kernel[(num_tokens, triton.cdiv(num_heads, block_h))](
        k, v, keys, values, key_scales, value_scales, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KIND=kind, LARGEST_VALUE=LARGEST.get(kind, 0.0), NUM_HEADS=num_heads, D=head_dim,
        BLOCK_H=block_h, BLOCK_D=block_d, num_warps=4,
    )  # fmt: skip
