"""Keys and values in 4 bits in Triton, with the layout and the bits of layers/attention/int4.py.

A group of 2 * HALF channels has HALF bytes, whose low bits hold its first channels and whose other
bits its second ones. Tiles of decoded heads keep the two channels of a byte beside each other, for
a product may have channels in any order; `load_heads` and `store_heads` do so for q and the result.

    byte      0             1             ..
    column    0     1       2     3       ..
    channel   0     HALF    1     HALF+1  ..      of its group

Shapes: T tokens, K key heads, D head size, N blocks, P tokens in a page.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

GROUP_CHANNELS = 32  # as in layers/attention/int4.py
MAX_ROWS = 16  # groups that a program of _encode holds at once


def half_group(head_dim: int) -> int:
    """Returns HALF."""
    return GROUP_CHANNELS // 2 if head_dim % GROUP_CHANNELS == 0 else head_dim // 2


@triton.jit
def _first_channels(start, is_row, HALF: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Returns the places of the first channels of the bytes of heads, and which of them exist."""
    BLOCK: tl.constexpr = triton.next_power_of_2(HALF)
    places = tl.arange(0, BLOCK_D // 2)[None, :]
    # Byte i of a group holds channel i and, HALF after it, another: groups are 2 HALF apart.
    channels = places // BLOCK * (2 * HALF) + places % BLOCK
    return start[:, None] + channels, is_row[:, None] & (places < D // 2)


@triton.jit
def load_heads(start, is_row, HALF: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Loads heads [BLOCK_M, BLOCK_D] that begin at start [BLOCK_M], in the order of decoded ones;
    HALF 0: as they lie."""
    if HALF > 0:
        at, mask = _first_channels(start, is_row, HALF, D, BLOCK_D)
        first = tl.load(at, mask=mask, other=0.0)
        second = tl.load(at + HALF, mask=mask, other=0.0)
        heads = tl.reshape(tl.join(first, second), (start.shape[0], BLOCK_D))
    else:
        dims = tl.arange(0, BLOCK_D)[None, :]
        mask = is_row[:, None] & (dims < D)
        heads = tl.load(start[:, None] + dims, mask=mask, other=0.0)
    return heads


@triton.jit
def store_heads(
    start, heads, is_row, HALF: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Stores heads in the order in which load_heads returns them."""
    heads = heads.to(start.dtype.element_ty)
    if HALF > 0:
        at, mask = _first_channels(start, is_row, HALF, D, BLOCK_D)
        first, second = tl.split(tl.reshape(heads, (start.shape[0], BLOCK_D // 2, 2)))
        tl.store(at, first, mask=mask)
        tl.store(at + HALF, second, mask=mask)
    else:
        dims = tl.arange(0, BLOCK_D)[None, :]
        tl.store(start[:, None] + dims, heads, mask=is_row[:, None] & (dims < D))


@triton.jit
def load_decoded(
    codes, ranges, starts, heads, is_there,
    HALF: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads heads [BLOCK_N, BLOCK_D] in float32, whose bytes begin at `starts` and whose numbers in
    the cache are `heads`; the scale and the lowest value of a group are read as one word."""
    BLOCK: tl.constexpr = triton.next_power_of_2(HALF)
    GROUPS: tl.constexpr = D // (2 * HALF)
    shape: tl.constexpr = (starts.shape[0], BLOCK_D // (2 * BLOCK), BLOCK)
    places, groups = tl.arange(0, BLOCK_D // 2), tl.arange(0, shape[1])
    mask = is_there[:, None] & (places < D // 2)[None, :]
    pairs = tl.load(codes + starts[:, None] + places[None, :], mask=mask, other=0)
    pairs = tl.reshape(pairs, shape)
    words = ranges.to(tl.pointer_type(tl.int32)) + heads[:, None] * GROUPS + groups[None, :]
    words = tl.load(words, mask=is_there[:, None] & (groups < GROUPS)[None, :], other=0)
    scale = (words << 16).to(tl.float32, bitcast=True)[:, :, None]
    lowest = (words & -65536).to(tl.float32, bitcast=True)[:, :, None]
    first = lowest + (pairs & 15).to(tl.float32) * scale
    second = lowest + (pairs >> 4).to(tl.float32) * scale
    return tl.reshape(tl.join(first, second), (shape[0], BLOCK_D))


@triton.jit
def _code(x, scale):
    code = tl.div_rn(x, scale)  # NaN where the scale is 0 or NaN
    return (tl.where(code > 0.0, tl.where(code < 15.0, code, 15.0), 0.0) + 0.5).to(tl.uint8)


@triton.jit
def _encode_groups(start, is_row, codes, ranges, rows, HALF: tl.constexpr):
    """Encodes groups of channels that begin at start [ROWS, 1], as group `rows` of the cache."""
    places = tl.arange(0, triton.next_power_of_2(HALF))[None, :]
    is_in = is_row & (places < HALF)
    first = tl.load(start + places, mask=is_in, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + places, mask=is_in, other=0.0).to(tl.float32)
    least = tl.min(tl.where(is_in, tl.minimum(first, second), float("inf")), 1)[:, None]
    most = tl.max(tl.where(is_in, tl.maximum(first, second), float("-inf")), 1)[:, None]
    odd = tl.sum((first - first) + (second - second), 1)[:, None]  # NaN if one is not finite
    lowest = least.to(tl.bfloat16)
    scale = (tl.div_rn(most - lowest.to(tl.float32), 15.0) + odd).to(tl.bfloat16)
    tl.store(ranges + 2 * rows, scale, mask=is_row)
    tl.store(ranges + 2 * rows + 1, lowest, mask=is_row)
    scale, lowest = scale.to(tl.float32), lowest.to(tl.float32)
    pairs = _code(first - lowest, scale) | _code(second - lowest, scale) << 4
    tl.store(codes + rows * HALF + places, pairs, mask=is_in)


@triton.jit
def _encode(
    k, v, keys, values, key_ranges, value_ranges, slots,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    NUM_KV: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Encodes ROWS groups of one token: of its keys, then of its values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    # Row r is group r % GROUPS of head r // GROUPS, and begins at that channel of the head.
    head, channel = rows // GROUPS, rows % GROUPS * (2 * HALF)
    is_row = (rows < NUM_KV * GROUPS) & (slot >= 0)
    rows += slot * (NUM_KV * GROUPS)
    start = k + token * k_token_stride + head * k_head_stride + channel
    _encode_groups(start, is_row, keys, key_ranges, rows, HALF)
    start = v + token * v_token_stride + head * v_head_stride + channel
    _encode_groups(start, is_row, values, value_ranges, rows, HALF)


def write_int4(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Writes `k`, `v` [T, K, D], whose channels are contiguous, to the rows `slots` [T] of `keys`,
    `values` [N, P, K, D / 2] uint8 and of their scales [N, P, K, groups, 2] bf16. Skips negative
    slots."""
    num_tokens, num_kv, head_dim = k.shape
    half = half_group(head_dim)
    groups = head_dim // (2 * half)
    rows = min(MAX_ROWS, triton.next_power_of_2(num_kv * groups))
    _encode[(num_tokens, triton.cdiv(num_kv * groups, rows))](
        k, v, keys, values, key_scales, value_scales, slots,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        NUM_KV=num_kv, GROUPS=groups, HALF=half, ROWS=rows, num_warps=4,
    )  # fmt: skip
