"""Rotary turns of the heads of q and k, with norms before them where a model has those.

Shapes: T tokens, N heads, D head size, R channel pairs that turn.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

PAIRS = 512  # channel pairs that a program turns at least


@triton.jit
def _weights(q_weight_ptr, k_weight_ptr, channels, is_in, is_q):
    """Of the norms, for the channels of every head; float32."""
    q_weights = tl.load(q_weight_ptr + channels, mask=is_in & is_q, other=0.0)
    return (q_weights + tl.load(k_weight_ptr + channels, mask=is_in & ~is_q, other=0.0)).to(
        tl.float32
    )


@triton.jit
def _normed(x, scale, weight, dtype: tl.constexpr):
    return ((x * scale).to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)


@triton.jit
def _rotate(
    x_ptr, token_stride, head_stride, num_heads, head_dim, cosines_ptr, sines_ptr, num_pairs,
    q_weight_ptr, k_weight_ptr, num_q_heads, eps,
    STEP: tl.constexpr, HAS_NORM: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Some heads of one token. STEP: from one pair to the next, 2 interleaved, 1 half-split. BLOCK:
    room for pairs, REST: for the channels behind them, 0 for none."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    pairs = tl.arange(0, BLOCK)[None, :]
    is_in = (heads < num_heads) & (pairs < num_pairs)
    dtype = x_ptr.dtype.element_ty
    first = pairs * STEP
    second = first + (1 if STEP == 2 else num_pairs)
    start = x_ptr + token * token_stride + heads * head_stride
    a = tl.load(start + first, mask=is_in, other=0.0).to(tl.float32)
    b = tl.load(start + second, mask=is_in, other=0.0).to(tl.float32)
    if HAS_NORM:
        is_q = heads < num_q_heads
        squares = tl.sum(a * a + b * b, axis=1)
        if REST > 0:
            behind = 2 * num_pairs + tl.arange(0, REST)[None, :]
            is_rest = (heads < num_heads) & (behind < head_dim)
            rest = tl.load(start + behind, mask=is_rest, other=0.0).to(tl.float32)
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / head_dim + eps)[:, None]
        a = _normed(a, scale, _weights(q_weight_ptr, k_weight_ptr, first, is_in, is_q), dtype)
        b = _normed(b, scale, _weights(q_weight_ptr, k_weight_ptr, second, is_in, is_q), dtype)
        if REST > 0:
            weight = _weights(q_weight_ptr, k_weight_ptr, behind, is_rest, is_q)
            tl.store(start + behind, _normed(rest, scale, weight, dtype).to(dtype), mask=is_rest)
    angles = token * num_pairs + pairs
    cosine = tl.load(cosines_ptr + angles, mask=pairs < num_pairs, other=0.0)
    sine = tl.load(sines_ptr + angles, mask=pairs < num_pairs, other=0.0)
    tl.store(start + first, (a * cosine - b * sine).to(dtype), mask=is_in)
    tl.store(start + second, (b * cosine + a * sine).to(dtype), mask=is_in)


def rotate(
    x: Tensor,
    cosines: Tensor,
    sines: Tensor,
    *,
    is_interleaved: bool,
    norms: tuple[Tensor, Tensor, int, float] | None = None,
) -> None:
    """Turns the first 2 R channels of every head of `x` [T, N, D] in place, behind the norms.

    cosines, sines: [T, R] float32, contiguous. norms: weight [D] of the first heads, of the others,
    how many are first, eps.
    """
    num_tokens, num_heads, head_dim = x.shape
    num_pairs = cosines.shape[1]
    block = triton.next_power_of_2(num_pairs)
    heads = min(triton.next_power_of_2(num_heads), max(1, PAIRS // block))
    q_weight, k_weight, num_q_heads, eps = norms or (x, x, 0, 0.0)
    rest = head_dim - 2 * num_pairs
    _rotate[(num_tokens, triton.cdiv(num_heads, heads))](
        x, x.stride(0), x.stride(1), num_heads, head_dim, cosines, sines, num_pairs,
        q_weight, k_weight, num_q_heads, eps,
        STEP=2 if is_interleaved else 1, HAS_NORM=norms is not None, HEADS=heads, BLOCK=block,
        REST=triton.next_power_of_2(rest) if rest else 0, num_warps=4,
    )  # fmt: skip
