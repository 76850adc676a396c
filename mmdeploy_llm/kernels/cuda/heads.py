"""Norms and rotates the heads of q and k, and writes k and v to the paged KV cache, in one launch.

    q   norm, rotate    in place
    k   norm, rotate    into the cache; in place without a cache
    v                   into the cache

A head is read in three pieces: the first channels of its R rotary pairs, their second channels, and
the channels after them. The caches may have 8 bits, with a scale for each token and head.
Shapes: T tokens, N heads, H of q, K of k and v, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from .int4 import write_int4

if TYPE_CHECKING:
    from mmdeploy_llm.forward import QKRotary

TILE = 512  # channel pairs that a program holds at once
PROGRAMS = 8192  # enough to fill a GPU; with more tokens a program computes more heads of a token
LARGEST = {2: 127.0, 3: 448.0}  # KIND of _heads -> largest value of int8 and of float8 e4m3


@triton.jit
def _load(start, is_row, D: tl.constexpr, PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr):
    """Loads the first and second channels of the pairs, and the channels after them up to D, of the
    heads that begin at start [heads, 1]: [heads, ..] each, zeros outside a head."""
    BLOCK: tl.constexpr = triton.next_power_of_2(PAIRS)
    if IS_INTERLEAVED:  # whole rows are read, as they lie in memory
        channels = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.load(start + channels, mask=is_row & (channels < 2 * PAIRS), other=0.0)
        first, second = tl.split(tl.reshape(both, (both.shape[0], BLOCK, 2)))
    else:
        pairs = tl.arange(0, BLOCK)[None, :]
        is_in = is_row & (pairs < PAIRS)
        first = tl.load(start + pairs, mask=is_in, other=0.0)
        second = tl.load(start + PAIRS + pairs, mask=is_in, other=0.0)
    if D > 2 * PAIRS:
        others = 2 * PAIRS + tl.arange(0, triton.next_power_of_2(D - 2 * PAIRS))[None, :]
        rest = tl.load(start + others, mask=is_row & (others < D), other=0.0)
    else:
        rest = tl.zeros((first.shape[0], 1), first.dtype)
    return first, second, rest


@triton.jit
def _store(
    start, is_row, first, second, rest,
    D: tl.constexpr, PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Stores heads in the three pieces that _load returns."""
    BLOCK: tl.constexpr = triton.next_power_of_2(PAIRS)
    dtype = start.dtype.element_ty
    first, second = first.to(dtype), second.to(dtype)
    if IS_INTERLEAVED:
        channels = tl.arange(0, 2 * BLOCK)[None, :]
        both = tl.reshape(tl.join(first, second), (first.shape[0], 2 * BLOCK))
        tl.store(start + channels, both, mask=is_row & (channels < 2 * PAIRS))
    else:
        pairs = tl.arange(0, BLOCK)[None, :]
        is_in = is_row & (pairs < PAIRS)
        tl.store(start + pairs, first, mask=is_in)
        tl.store(start + PAIRS + pairs, second, mask=is_in)
    if D > 2 * PAIRS:
        others = 2 * PAIRS + tl.arange(0, triton.next_power_of_2(D - 2 * PAIRS))[None, :]
        tl.store(start + others, rest.to(dtype), mask=is_row & (others < D))


@triton.jit
def _normed(x, scale, weight, dtype: tl.constexpr):
    return ((x * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def _rotated(
    start, is_row, weight_ptr, rotary,
    ROTATES: tl.constexpr, HAS_NORM: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Loads heads and returns their pieces after norm and rotation, each rounded to the dtype, in
    float32. rotary: cosines and sines of the token, eps of the norm."""
    dtype = start.dtype.element_ty
    first, second, rest = _load(start, is_row, D, PAIRS, IS_INTERLEAVED)
    first, second, rest = first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, axis=1) + tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / D + rotary[2])[:, None]
        # Loaded again for each head, so that no thread needs values that another one has loaded.
        place = tl.zeros_like(scale).to(tl.int32)
        weights = _load(weight_ptr + place, place == 0, D, PAIRS, IS_INTERLEAVED)
        first = _normed(first, scale, weights[0], dtype)
        second = _normed(second, scale, weights[1], dtype)
        rest = _normed(rest, scale, weights[2], dtype)
    if ROTATES:
        rotated = (first * rotary[0] - second * rotary[1]).to(dtype).to(tl.float32)
        second = (second * rotary[0] + first * rotary[1]).to(dtype).to(tl.float32)
        first = rotated
    return first, second, rest


@triton.jit
def _rotate_in_place(
    x, heads, head_stride, num_heads, weight_ptr, rotary,
    ROTATES: tl.constexpr, HAS_NORM: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norms and rotates some heads of the token that begins at x."""
    USED: tl.constexpr = D if HAS_NORM else 2 * PAIRS  # the other channels do not change
    start, is_row = x + heads * head_stride, heads < num_heads
    first, second, rest = _rotated(
        start, is_row, weight_ptr, rotary, ROTATES, HAS_NORM, USED, PAIRS, IS_INTERLEAVED
    )
    _store(start, is_row, first, second, rest, USED, PAIRS, IS_INTERLEAVED)


@triton.jit
def _rotate_into(
    cache, scales, slot, x, heads, head_stride, num_heads, weight_ptr, rotary,
    KIND: tl.constexpr, LARGEST_VALUE: tl.constexpr, ROTATES: tl.constexpr, HAS_NORM: tl.constexpr,
    D: tl.constexpr, PAIRS: tl.constexpr, IS_INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Norms, rotates and stores some heads of the token that begins at x, if it has a slot."""
    is_row = (heads < num_heads) & (slot >= 0)
    first, second, rest = _rotated(
        x + heads * head_stride,
        is_row,
        weight_ptr,
        rotary,
        ROTATES,
        HAS_NORM,
        D,
        PAIRS,
        IS_INTERLEAVED,
    )
    rows = slot * num_heads + heads
    if KIND > 1:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        largest = tl.maximum(largest, tl.max(tl.abs(rest), 1))[:, None]
        # What is not finite makes the factor NaN: a maximum leaves NaN out.
        none = tl.sum(first * 0.0 + second * 0.0, 1) + tl.sum(rest * 0.0, 1)
        factors = tl.maximum(largest / LARGEST_VALUE, 1e-12) + none[:, None]
        tl.store(scales + rows, factors, mask=is_row)
        is_finite = factors == factors
        first = tl.where(is_finite, first / factors, 0.0)
        second = tl.where(is_finite, second / factors, 0.0)
        rest = tl.where(is_finite, rest / factors, 0.0)
    if KIND == 2:
        first, second, rest = tl.floor(first + 0.5), tl.floor(second + 0.5), tl.floor(rest + 0.5)
    _store(cache + rows * D, is_row, first, second, rest, D, PAIRS, IS_INTERLEAVED)


@triton.jit
def _heads(
    q, k, v, keys, values, key_scales, value_scales, slots, cosines_ptr, sines_ptr, q_weight,
    k_weight, eps, q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride,
    v_head_stride,
    NUM_Q: tl.constexpr, NUM_KV: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr, ROTATES: tl.constexpr, HAS_NORM: tl.constexpr, KIND: tl.constexpr,
    LARGEST_VALUE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Computes one token: groups of HEADS heads of q, then of k, then of v, shared out among the
    programs of the token. KIND: 0 k in place, 1 into a cache of floats, 2 of int8, 3 of float8."""
    Q_GROUPS: tl.constexpr = triton.cdiv(NUM_Q, HEADS)
    KV_GROUPS: tl.constexpr = triton.cdiv(NUM_KV, HEADS)
    BLOCK: tl.constexpr = triton.next_power_of_2(PAIRS)
    token = tl.program_id(0).to(tl.int64)
    places, pairs = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    pairs += tl.zeros_like(places)  # [HEADS, BLOCK], one row per head: see _rotated
    rotary = (pairs, pairs, eps)
    if ROTATES:
        at = token * PAIRS + pairs
        cosines = tl.load(cosines_ptr + at, mask=pairs < PAIRS, other=0.0)
        sines = tl.load(sines_ptr + at, mask=pairs < PAIRS, other=0.0)
        rotary = (cosines, sines, eps)
    if KIND > 0:
        slot = tl.load(slots + token)
    num_groups = Q_GROUPS + (2 * KV_GROUPS if KIND > 0 else KV_GROUPS)
    for group in range(tl.program_id(1), num_groups, tl.num_programs(1)):
        if group < Q_GROUPS:
            _rotate_in_place(
                q + token * q_token_stride, group * HEADS + places, q_head_stride, NUM_Q,
                q_weight, rotary, ROTATES, HAS_NORM, D, PAIRS, IS_INTERLEAVED,
            )  # fmt: skip
        elif KIND == 0:
            _rotate_in_place(
                k + token * k_token_stride, (group - Q_GROUPS) * HEADS + places, k_head_stride,
                NUM_KV, k_weight, rotary, ROTATES, HAS_NORM, D, PAIRS, IS_INTERLEAVED,
            )  # fmt: skip
        elif group < Q_GROUPS + KV_GROUPS:
            _rotate_into(
                keys, key_scales, slot, k + token * k_token_stride,
                (group - Q_GROUPS) * HEADS + places, k_head_stride, NUM_KV, k_weight, rotary,
                KIND, LARGEST_VALUE, ROTATES, HAS_NORM, D, PAIRS, IS_INTERLEAVED,
            )  # fmt: skip
        else:
            _rotate_into(
                values, value_scales, slot, v + token * v_token_stride,
                (group - Q_GROUPS - KV_GROUPS) * HEADS + places, v_head_stride, NUM_KV, None,
                rotary, KIND, LARGEST_VALUE, False, False, D, PAIRS, IS_INTERLEAVED,
            )  # fmt: skip


def rotate(x: Tensor, rotary: QKRotary, num_q_heads: int) -> None:
    """Norms and rotates the heads of `x` [T, N, D] in place: num_q_heads heads of q, followed by
    those of k."""
    _launch(x[:, :num_q_heads], x[:, num_q_heads:], None, rotary)


def write_cache(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    q: Tensor | None = None,
    rotary: QKRotary | None = None,
) -> None:
    """Writes `k`, `v` [T, K, D] to the rows `slots` [T] of `keys`, `values` [N, P, K, D], in the
    cache's dtype; scales: [N, P, K] float32, of 8-bit caches. Skips negative slots.

    With `q` [T, H, D] and `rotary` it first norms and rotates q and k, bit-equal to `rotate`, but
    writes only `q` in place. The channels of q must be contiguous. A cache of 4 bits (see
    layers/attention/int4.py) takes a launch of its own, and k is rotated in place too: the channels
    of a byte may lie in any two of the pieces of a head.
    """
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    if keys.dtype is torch.uint8:
        if q is not None and rotary is not None:
            _launch(q, k, None, rotary)
        write_int4(k, v, keys, values, slots, key_scales, value_scales)
        return
    if q is None or rotary is None:
        q, rotary = k[:, :0], None
    _launch(q, k, v, rotary, keys, values, key_scales, value_scales, slots)


def _launch(
    q: Tensor, k: Tensor, v: Tensor | None, rotary: QKRotary | None, *cache: Tensor | None
) -> None:
    (num_tokens, num_q, head_dim), num_kv = q.shape, k.shape[1]
    keys, values, key_scales, value_scales, slots = cache or (None,) * 5
    kind = 0 if keys is None else 1
    if keys is not None and key_scales is not None:
        kind = 3 if keys.dtype.is_floating_point else 2
    v = k if v is None else v
    heads = max(1, TILE // triton.next_power_of_2(triton.cdiv(head_dim, 2)))
    heads = min(heads, triton.next_power_of_2(max(num_q, num_kv)))
    groups = triton.cdiv(num_q, heads) + (2 if kind else 1) * triton.cdiv(num_kv, heads)
    programs = max(1, min(groups, PROGRAMS // max(1, num_tokens)))
    _heads[(num_tokens, programs)](
        q, k, v, keys, values, key_scales, value_scales, slots, *_operands(rotary),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        NUM_Q=num_q, NUM_KV=num_kv, D=head_dim,
        PAIRS=head_dim // 2 if rotary is None else rotary.cosines.shape[1],
        IS_INTERLEAVED=rotary is not None and rotary.is_interleaved, ROTATES=rotary is not None,
        HAS_NORM=rotary is not None and rotary.q_weight is not None, KIND=kind,
        LARGEST_VALUE=LARGEST.get(kind, 0.0), HEADS=heads, num_warps=2,
    )  # fmt: skip


def _operands(rotary: QKRotary | None) -> tuple[Tensor | float | None, ...]:
    if rotary is None:
        return None, None, None, None, 0.0
    return rotary.cosines, rotary.sines, rotary.q_weight, rotary.k_weight, rotary.eps
