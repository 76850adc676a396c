"""Attention over the paged KV cache in Triton: prefill of ragged batches, and decode that cuts long
contexts into splits so that few sequences keep a whole GPU busy.

What a token sees is a range of its sequence's keys, first_seen .. behind_seen: all before it, a
window of them, or the whole of its own media item. The G query heads of a key head are rows of one
tile, so that each key is read once for all of them.

    tile of BLOCK_M rows    token 0: head 0 .. G-1 | token 1: head 0 .. G-1 | ..

Shapes: T tokens, B sequences, H query heads, K key heads, G = H // K, D head size, P tokens in a
page, M pages in the longest block table, S splits. Keys in 8 bits have a scale for each token and
head: scores take the key's, probabilities the value's.

Not tuned on a GPU yet: tile sizes are those that fit the shared memory of the card.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SPLITS = 64
SMALLEST_DOT = 16  # rows of the smallest matrix product
SMALLEST_SPLIT = 128  # keys; below, a split costs more than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What launch sizes follow. shared_memory: bytes a block of threads may use."""

    num_processors: int
    shared_memory: int


def facts_of(device: torch.device) -> Gpu:
    """Those of a CUDA device."""
    index = torch.cuda.current_device() if device.index is None else device.index
    found = triton.runtime.driver.active.utils.get_device_properties(index)
    return Gpu(num_processors=found["multiprocessor_count"], shared_memory=found["max_shared_mem"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """One layer of the KV cache. keys, values: [N, P, K, D]; scales [N, P, K] float32 of 8-bit
    caches."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """Whose tokens attend. starts: [B + 1] int32, first row of each in q. context_lens: [B] int32.
    tables: [B, M] int32. first_seen, behind_seen: [T] int32 by row of q, where media items see
    themselves; else None. max_query, max_context: bounds of the lengths."""

    starts: Tensor
    context_lens: Tensor
    tables: Tensor
    max_query: int
    max_context: int
    first_seen: Tensor | None = None
    behind_seen: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """How queries and keys make scores; see forward.AttentionContext."""

    scale: float
    window: int | None
    softcap: float | None


@triton.jit
def _load_pages(
    table, pages, scales, columns, is_there, head, dims, token_stride, head_stride, num_heads,
    IS_KEYS: tl.constexpr, IS_MASKED: tl.constexpr, HAS_SCALES: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Keys [BLOCK_D, BLOCK_N] or values [BLOCK_N, BLOCK_D] of the columns, and their scales."""
    if IS_MASKED:
        page = tl.load(table + columns // PAGE, mask=is_there, other=0).to(tl.int64)
    else:
        page = tl.load(table + columns // PAGE).to(tl.int64)
    slots = page * PAGE + columns % PAGE
    rows = slots * token_stride + head * head_stride
    if IS_KEYS:
        places = rows[None, :] + dims[:, None]
        mask = is_there[None, :] & (dims < D)[:, None]
    else:
        places = rows[:, None] + dims[None, :]
        mask = is_there[:, None] & (dims < D)[None, :]
    if IS_MASKED or D != BLOCK_D:
        tile = tl.load(pages + places, mask=mask, other=0.0)
    else:
        tile = tl.load(pages + places)
    if HAS_SCALES:
        if tile.dtype == tl.int8:
            tile = tile.to(tl.float32)
        factors = tl.load(scales + slots * num_heads + head, mask=is_there, other=0.0)
    else:
        factors = tl.full(columns.shape, 1.0, tl.float32)
    return tile, factors


@triton.jit
def _attend(
    q, acc, total, largest, table, keys, values, key_scales, value_scales, first, behind,
    begin, end, head, dims, token_stride, head_stride, num_heads, scale, softcap,
    IS_MASKED: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of q [BLOCK_M, BLOCK_D] over the keys begin .. end, on top of those before them: sums
    weighted by 2 ** (score - largest), the weights' sums, the largest scores. IS_MASKED: row m
    sees first[m] .. behind[m] of them; else all, which are whole tiles."""
    log2_e: tl.constexpr = 1.4426950408889634
    for at in range(begin, end, BLOCK_N):
        columns = at + tl.arange(0, BLOCK_N)
        is_there = columns < end
        k, k_factors = _load_pages(
            table, keys, key_scales, columns, is_there, head, dims, token_stride, head_stride,
            num_heads, True, IS_MASKED, HAS_SCALES, D, PAGE, BLOCK_D,
        )  # fmt: skip
        scores = tl.dot(q, k.to(q.dtype), input_precision=PRECISION)
        if HAS_SCALES:
            scores = scores * k_factors[None, :]
        if HAS_SOFTCAP:  # softcap * tanh(s / softcap), by an exponential that cannot overflow
            small = tl.exp(-2.0 * tl.abs(scores * scale) / softcap)
            capped = (softcap * log2_e) * (1.0 - small) / (1.0 + small)
            scores = tl.where(scores * scale < 0.0, -capped, capped)
        else:
            scores = scores * (scale * log2_e)
        if IS_MASKED:
            is_seen = (columns[None, :] >= first[:, None]) & (columns[None, :] < behind[:, None])
            scores = tl.where(is_seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(largest - finite)
        total = total * shrink + tl.sum(weights, 1)
        v, v_factors = _load_pages(
            table, values, value_scales, columns, is_there, head, dims, token_stride, head_stride,
            num_heads, False, IS_MASKED, HAS_SCALES, D, PAGE, BLOCK_D,
        )  # fmt: skip
        if HAS_SCALES:
            weights = weights * v_factors[None, :]
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        largest = new_largest
    return acc, total, largest


@triton.jit
def _sequence_of(tile, starts, num_seqs, BLOCK_Q: tl.constexpr):
    """The last sequence whose tiles begin at or before this one. Those of sequence s begin at tile
    (starts[s] - starts[0]) // BLOCK_Q + s, which leaves room for all of them."""
    base = tl.load(starts)
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(starts + middle) - base) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    first_tile = (tl.load(starts + low) - base) // BLOCK_Q + low
    return low, (tile - first_tile) * BLOCK_Q


@triton.jit
def _ranges(
    places, is_row, rows, first_seen, behind_seen, window,
    HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr,
):  # fmt: skip
    """What tokens at these places of their sequence see; nothing where there is no row."""
    if HAS_RANGES:
        first = tl.load(first_seen + rows, mask=is_row, other=0)
        behind = tl.load(behind_seen + rows, mask=is_row, other=0)
    else:
        behind = tl.where(is_row, places + 1, 0)
        first = behind * 0
        if HAS_WINDOW:
            first = tl.maximum(behind - window, 0)
    return first, behind


# Of what changes from step to step nothing is assumed, so that no batch compiles a kernel anew.
@triton.jit(do_not_specialize=["tables", "starts", "context_lens", "num_seqs", "table_stride"])
def _prefill_kernel(
    q_ptr, out_ptr, keys, values, key_scales, value_scales, tables, starts, context_lens,
    first_seen, behind_seen, num_seqs, window, scale, softcap,
    q_token_stride, q_head_stride, out_token_stride, token_stride, head_stride, table_stride,
    HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_SCALES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_Q tokens of one sequence: whole key tiles that all of them see, then the others."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    seq, first_token = _sequence_of(tl.program_id(0), starts, num_seqs, BLOCK_Q)
    start = tl.load(starts + seq)
    query_len = tl.load(starts + seq + 1) - start
    if first_token < query_len:
        lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        tokens, heads = first_token + lanes // GROUP, head * GROUP + lanes % GROUP
        is_row = (lanes < BLOCK_Q * GROUP) & (tokens < query_len)
        mask = is_row[:, None] & (dims < D)[None, :]
        rows = (start + tokens).to(tl.int64)
        places = tl.load(context_lens + seq) - query_len + tokens
        first, behind = _ranges(
            places, is_row, rows, first_seen, behind_seen, window, HAS_WINDOW, HAS_RANGES
        )
        lowest = tl.min(tl.where(is_row, first, 2147483647), 0) // BLOCK_N * BLOCK_N
        at = rows * q_token_stride + heads * q_head_stride
        q = tl.load(q_ptr + at[:, None] + dims[None, :], mask=mask, other=0.0)
        table = tables + seq.to(tl.int64) * table_stride
        largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if not HAS_WINDOW and not HAS_RANGES:
            common = tl.min(tl.where(is_row, behind, 2147483647), 0) // BLOCK_N * BLOCK_N
            acc, total, largest = _attend(
                q, acc, total, largest, table, keys, values, key_scales, value_scales, first,
                behind, lowest, common, head, dims, token_stride, head_stride, num_heads, scale,
                softcap, False, HAS_SCALES, HAS_SOFTCAP, D, PAGE, BLOCK_N, BLOCK_D, PRECISION,
            )  # fmt: skip
            lowest = common
        acc, total, largest = _attend(
            q, acc, total, largest, table, keys, values, key_scales, value_scales, first, behind,
            lowest, tl.max(behind, 0), head, dims, token_stride, head_stride, num_heads, scale,
            softcap, True, HAS_SCALES, HAS_SOFTCAP, D, PAGE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        at = out_ptr + (rows * out_token_stride + heads * D)[:, None] + dims[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tables", "context_lens", "table_stride"])
def _decode_kernel(
    q_ptr, out_ptr, partial_ptr, log_sums, keys, values, key_scales, value_scales, tables,
    context_lens, window, scale, softcap,
    q_token_stride, q_head_stride, out_token_stride, token_stride, head_stride, table_stride,
    HAS_WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One token of one sequence over one part of its context: the attention itself where there is
    one part, else what _combine_kernel joins."""
    seq, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_splits = tl.num_programs(2)
    context = tl.load(context_lens + seq)
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(context - window, 0)
    each = tl.cdiv(tl.cdiv(context - first_key, num_splits), BLOCK_N) * BLOCK_N
    begin = first_key + split * each
    end = tl.minimum(begin + each, context)
    rows, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    heads = head * GROUP + rows
    mask = (rows < GROUP)[:, None] & (dims < D)[None, :]
    places = seq * q_token_stride + heads * q_head_stride
    q = tl.load(q_ptr + places[:, None] + dims[None, :], mask=mask, other=0.0)
    seen_from = tl.full([BLOCK_M], 0, tl.int32) + begin
    seen_to = tl.full([BLOCK_M], 0, tl.int32) + end
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc, total, largest = _attend(
        q, acc, total, largest, tables + seq * table_stride, keys, values, key_scales,
        value_scales, seen_from, seen_to, begin, end, head, dims, token_stride, head_stride,
        tl.num_programs(1), scale, softcap, True, HAS_SCALES, HAS_SOFTCAP, D, PAGE, BLOCK_N,
        BLOCK_D, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if not IS_SPLIT:
        places = seq * out_token_stride + heads * D
        tl.store(
            out_ptr + places[:, None] + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask
        )
    else:
        places = (seq * tl.num_programs(1) * GROUP + heads) * num_splits + split
        tl.store(partial_ptr + places[:, None] * D + dims[None, :], acc, mask=mask)
        log_sum = largest + tl.log2(tl.where(total == 0.0, 1.0, total))  # -inf without keys
        tl.store(log_sums + places, log_sum, mask=rows < GROUP)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    out_ptr, partial_ptr, log_sums, out_token_stride, num_splits,
    D: tl.constexpr, MOST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Joins the parts of one head of one sequence, each with the weight of its keys."""
    seq, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, dims = tl.arange(0, MOST), tl.arange(0, BLOCK_D)
    places = (seq * tl.num_programs(1) + head) * num_splits + splits
    log_sum = tl.load(log_sums + places, mask=splits < num_splits, other=float("-inf"))
    weights = tl.exp2(log_sum - tl.max(log_sum, 0))
    mask = (dims < D)[None, :] & (weights > 0.0)[:, None]
    parts = tl.load(partial_ptr + places[:, None] * D + dims[None, :], mask=mask, other=0.0)
    out = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(
        out_ptr + seq * out_token_stride + head * D + dims,
        out.to(out_ptr.dtype.element_ty),
        mask=dims < D,
    )


def prefill(
    q: Tensor, out: Tensor, pages: Pages, sequences: Sequences, scores: Scores, gpu: Gpu
) -> None:
    """Attention of the sequences' rows of `q` [T, H, D] into the same rows of `out`."""
    group, num_heads = q.shape[1] // pages.keys.shape[2], pages.keys.shape[2]
    tile = _tile(q, 128 * group, pages, gpu)  # short queries too: one kernel for all steps
    block_q = max(1, tile.rows // group)
    num_seqs = sequences.context_lens.shape[0]
    most_tokens = min(q.shape[0], num_seqs * sequences.max_query)
    has_ranges = sequences.first_seen is not None
    _prefill_kernel[(most_tokens // block_q + num_seqs, num_heads)](
        q, out, pages.keys, pages.values, pages.key_scales, pages.value_scales, sequences.tables,
        sequences.starts, sequences.context_lens, sequences.first_seen, sequences.behind_seen,
        num_seqs, scores.window or 0, scores.scale, scores.softcap or 0.0,
        q.stride(0), q.stride(1), out.stride(0), pages.keys.stride(1), pages.keys.stride(2),
        sequences.tables.stride(0),
        HAS_WINDOW=scores.window is not None, HAS_RANGES=has_ranges,
        BLOCK_Q=block_q, **_common(q, pages, scores, tile),
    )  # fmt: skip


def decode(
    q: Tensor, out: Tensor, pages: Pages, sequences: Sequences, scores: Scores, gpu: Gpu
) -> None:
    """Attention of one token each of B sequences: the first B rows of `q` [.., H, D] into those of
    `out`. Launch sizes follow max_context, so that a captured launch serves every context."""
    num_seqs, num_heads = sequences.context_lens.shape[0], pages.keys.shape[2]
    group = q.shape[1] // num_heads
    tile = _tile(q, group, pages, gpu)
    splits = num_splits(num_seqs * num_heads, sequences.max_context, scores.window, gpu)
    partial = log_sums = None
    if splits > 1:
        shape = (num_seqs, q.shape[1], splits)
        partial = torch.empty((*shape, q.shape[2]), dtype=torch.float32, device=q.device)
        log_sums = torch.empty(shape, dtype=torch.float32, device=q.device)
    common = _common(q, pages, scores, tile)
    _decode_kernel[(num_seqs, num_heads, splits)](
        q, out, partial, log_sums, pages.keys, pages.values, pages.key_scales, pages.value_scales,
        sequences.tables, sequences.context_lens, scores.window or 0, scores.scale,
        scores.softcap or 0.0, q.stride(0), q.stride(1), out.stride(0), pages.keys.stride(1),
        pages.keys.stride(2), sequences.tables.stride(0),
        HAS_WINDOW=scores.window is not None, IS_SPLIT=splits > 1, **common,
    )  # fmt: skip
    if splits > 1:
        _combine_kernel[(num_seqs, q.shape[1])](
            out, partial, log_sums, out.stride(0), splits, D=q.shape[2], MOST=MAX_SPLITS,
            BLOCK_D=common["BLOCK_D"], num_warps=4,
        )  # fmt: skip


def num_splits(num_rows: int, max_context: int, window: int | None, gpu: Gpu) -> int:
    """A power of two: as many parts of each context as give every processor four, where the parts
    stay long enough."""
    longest = max_context if window is None else min(max_context, window)
    wanted = min(4 * gpu.num_processors // num_rows, longest // SMALLEST_SPLIT, MAX_SPLITS)
    return 1 << max(0, wanted.bit_length() - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """rows: of queries and heads. columns: keys in a step of the loop."""

    rows: int
    columns: int
    dims: int
    num_warps: int
    num_stages: int


def _tile(q: Tensor, num_rows: int, pages: Pages, gpu: Gpu) -> _Tile:
    """What fits the registers, and as many key tiles in flight as the shared memory holds: one step
    of the loop finds the pages, the next their keys, so that each further tile takes two stages."""
    dims = max(SMALLEST_DOT, triton.next_power_of_2(q.shape[2]))
    row_bytes = dims * q.element_size()
    is_wide = q.dtype is torch.float32  # no tensor cores: larger tiles do not fit the registers
    most_rows = SMALLEST_DOT if is_wide else 128 if row_bytes <= 256 else 64
    group = q.shape[1] // pages.keys.shape[2]
    rows = max(SMALLEST_DOT, triton.next_power_of_2(max(num_rows, group)))
    rows = max(min(rows, most_rows), triton.next_power_of_2(group))
    columns = 64 if row_bytes <= 256 and not is_wide else 32
    num_tiles = (gpu.shared_memory - rows * row_bytes) // (2 * columns * row_bytes)
    return _Tile(
        rows=rows,
        columns=columns,
        dims=dims,
        num_warps=8 if rows >= 128 or is_wide else 4,
        num_stages=5 if num_tiles > 4 else 3 if num_tiles > 1 else 1,
    )


def _common(q: Tensor, pages: Pages, scores: Scores, tile: _Tile) -> dict[str, object]:
    """What the kernels are compiled for. float32 is multiplied as float32, not in TF32."""
    return {
        "HAS_SCALES": pages.key_scales is not None,
        "HAS_SOFTCAP": scores.softcap is not None,
        "GROUP": q.shape[1] // pages.keys.shape[2],
        "D": q.shape[2],
        "PAGE": pages.keys.shape[1],
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_D": tile.dims,
        "PRECISION": "ieee" if q.dtype is torch.float32 else "tf32",
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
