"""Kernels for attention over the paged KV cache: prefill of ragged batches, and decode that splits
long contexts so that few sequences keep a whole GPU busy.

A token attends to a range of its sequence's keys, first .. end: all keys up to its own, a window of
them, or its whole media item as well. The G query heads of a key head are rows of one tile, so that
each key is read once for all of them.

    tile of BLOCK_M rows    token 0: head 0 .. G-1 | token 1: head 0 .. G-1 | ..

Shapes: T tokens, B sequences, H query heads, K key heads, G = H // K, D head size, P tokens in a
page, M pages in the longest block table, S splits. Keys in 8 bits have a scale for each token and
head: it multiplies the scores for keys, and the probabilities for values. Those in 4 bits (HALF is
not 0) are decoded to floats, with channels in the order of int4.py, as those of q and acc.

Not tuned on a GPU yet: tile sizes are chosen to fit the shared memory of the card.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .int4 import load_decoded, load_heads, store_heads


@triton.jit
def _load_pages(
    table, pages, scales, columns, is_there, head, dims, token_stride, head_stride, num_heads,
    IS_KEYS: tl.constexpr, IS_MASKED: tl.constexpr, HAS_SCALES: tl.constexpr, HALF: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Loads keys [BLOCK_D, BLOCK_N] or values [BLOCK_N, BLOCK_D], and their scales."""
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
    if HALF > 0:
        heads = slots * num_heads + head
        tile = load_decoded(pages, scales, rows, heads, is_there, HALF, D, BLOCK_D)
        if IS_KEYS:
            tile = tl.trans(tile)
    elif IS_MASKED or D != BLOCK_D:
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
    q, acc, total, largest, table, keys, values, key_scales, value_scales, first, stop,
    begin, end, head, dims, token_stride, head_stride, num_heads, scale, softcap,
    IS_MASKED: tl.constexpr, HAS_SCALES: tl.constexpr, HALF: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds attention of q [BLOCK_M, BLOCK_D] over the keys begin .. end to that over earlier keys.
    acc: sums of values weighted by 2 ** (score - largest). total: sums of the weights. largest:
    largest scores. IS_MASKED: row m attends to the keys first[m] .. stop[m] - 1 only; otherwise to
    all keys, which fill whole tiles."""
    log2_e: tl.constexpr = 1.4426950408889634
    for at in range(begin, end, BLOCK_N):
        columns = at + tl.arange(0, BLOCK_N)
        is_there = columns < end
        k, k_factors = _load_pages(
            table, keys, key_scales, columns, is_there, head, dims, token_stride, head_stride,
            num_heads, True, IS_MASKED, HAS_SCALES, HALF, D, PAGE, BLOCK_D,
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
            is_visible = (columns[None, :] >= first[:, None]) & (columns[None, :] < stop[:, None])
            scores = tl.where(is_visible, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(largest - finite)
        total = total * shrink + tl.sum(weights, 1)
        v, v_factors = _load_pages(
            table, values, value_scales, columns, is_there, head, dims, token_stride, head_stride,
            num_heads, False, IS_MASKED, HAS_SCALES, HALF, D, PAGE, BLOCK_D,
        )  # fmt: skip
        if HAS_SCALES:
            weights = weights * v_factors[None, :]
        acc = acc * shrink[:, None]
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
        largest = new_largest
    return acc, total, largest


@triton.jit
def _begin(sinks, heads, has_sink, HAS_SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Returns the largest score and the sum of weights of rows without keys: those of the sink of
    their head, a key without a value, where they have one."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        log2_e: tl.constexpr = 1.4426950408889634
        score = tl.load(sinks + heads, mask=has_sink, other=float("-inf"))
        largest = score * log2_e
        total = tl.where(has_sink, 1.0, 0.0)
    return largest, total


@triton.jit
def _sequence_of(tile, starts, num_seqs, BLOCK_Q: tl.constexpr):
    """Returns the sequence of a tile and the tile's first token in it. Tiles of sequence s begin at
    (starts[s] - starts[0]) // BLOCK_Q + s, which reserves enough tiles for every sequence."""
    base = tl.load(starts)
    low = tile * 0
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if (tl.load(starts + middle) - base) // BLOCK_Q + middle <= tile:
            low = middle
        else:
            high = middle
    # Each sequence before this one may have a last tile that is not full: one more tile for each.
    first_tile = (tl.load(starts + low) - base) // BLOCK_Q + low
    return low, (tile - first_tile) * BLOCK_Q


@triton.jit
def _ranges(
    places, is_row, rows, first_visible, end_visible, window,
    HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr,
):  # fmt: skip
    """Returns the visible keys, first .. stop - 1, of tokens at these positions of their
    sequence; an empty range where there is no row."""
    if HAS_RANGES:
        first = tl.load(first_visible + rows, mask=is_row, other=0)
        stop = tl.load(end_visible + rows, mask=is_row, other=0)
    else:
        stop = tl.where(is_row, places + 1, 0)
        first = stop * 0
        if HAS_WINDOW:
            first = tl.maximum(stop - window, 0)
    return first, stop


# Arguments that change from step to step are not specialized, so that no batch compiles anew.
@triton.jit(do_not_specialize=["tables", "starts", "context_lens", "num_seqs", "table_stride"])
def prefill_kernel(
    q_ptr, out_ptr, keys, values, key_scales, value_scales, tables, starts, context_lens,
    first_visible, end_visible, sinks, num_seqs, window, scale, softcap,
    q_token_stride, q_head_stride, out_token_stride, token_stride, head_stride, table_stride,
    HAS_WINDOW: tl.constexpr, HAS_RANGES: tl.constexpr, HAS_SCALES: tl.constexpr,
    HALF: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, PAGE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Computes BLOCK_Q tokens of one sequence: first over the whole key tiles that all tokens
    attend to, then over the other keys."""
    head, num_heads = tl.program_id(1), tl.num_programs(1)
    seq, first_token = _sequence_of(tl.program_id(0), starts, num_seqs, BLOCK_Q)
    start = tl.load(starts + seq)
    query_len = tl.load(starts + seq + 1) - start
    if first_token < query_len:
        lanes, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        # The GROUP query heads of a key head are adjacent lanes, so that one product covers them.
        tokens, heads = first_token + lanes // GROUP, head * GROUP + lanes % GROUP
        is_row = (lanes < BLOCK_Q * GROUP) & (tokens < query_len)
        rows = (start + tokens).to(tl.int64)
        places = tl.load(context_lens + seq) - query_len + tokens
        first, stop = _ranges(
            places, is_row, rows, first_visible, end_visible, window, HAS_WINDOW, HAS_RANGES
        )
        lowest = tl.min(tl.where(is_row, first, 2147483647), 0) // BLOCK_N * BLOCK_N
        at = rows * q_token_stride + heads * q_head_stride
        q = load_heads(q_ptr + at, is_row, HALF, D, BLOCK_D)
        table = tables + seq.to(tl.int64) * table_stride
        largest, total = _begin(sinks, heads, is_row, HAS_SINKS, BLOCK_M)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        if not HAS_WINDOW and not HAS_RANGES:
            common = tl.min(tl.where(is_row, stop, 2147483647), 0) // BLOCK_N * BLOCK_N
            acc, total, largest = _attend(
                q, acc, total, largest, table, keys, values, key_scales, value_scales, first,
                stop, lowest, common, head, dims, token_stride, head_stride, num_heads, scale,
                softcap, False, HAS_SCALES, HALF, HAS_SOFTCAP, D, PAGE, BLOCK_N, BLOCK_D,
                PRECISION,
            )  # fmt: skip
            lowest = common
        acc, total, largest = _attend(
            q, acc, total, largest, table, keys, values, key_scales, value_scales, first, stop,
            lowest, tl.max(stop, 0), head, dims, token_stride, head_stride, num_heads, scale,
            softcap, True, HAS_SCALES, HALF, HAS_SOFTCAP, D, PAGE, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        at = out_ptr + rows * out_token_stride + heads * D
        store_heads(at, acc, is_row, HALF, D, BLOCK_D)


@triton.jit(do_not_specialize=["tables", "context_lens", "table_stride"])
def decode_kernel(
    q_ptr, out_ptr, partial_ptr, log_sums, keys, values, key_scales, value_scales, tables,
    context_lens, sinks, window, scale, softcap,
    q_token_stride, q_head_stride, out_token_stride, token_stride, head_stride, table_stride,
    HAS_WINDOW: tl.constexpr, HAS_SCALES: tl.constexpr, HALF: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attends with one token of one sequence over one split of its context. Stores the result if
    there is one split, else a partial result for combine_kernel."""
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
    is_row = rows < GROUP
    places = seq * q_token_stride + heads * q_head_stride
    q = load_heads(q_ptr + places, is_row, HALF, D, BLOCK_D)
    seen_from = tl.full([BLOCK_M], 0, tl.int32) + begin
    seen_to = tl.full([BLOCK_M], 0, tl.int32) + end
    # The sink is a key of the first split.
    largest, total = _begin(sinks, heads, is_row & (split == 0), HAS_SINKS, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc, total, largest = _attend(
        q, acc, total, largest, tables + seq * table_stride, keys, values, key_scales,
        value_scales, seen_from, seen_to, begin, end, head, dims, token_stride, head_stride,
        tl.num_programs(1), scale, softcap, True, HAS_SCALES, HALF, HAS_SOFTCAP, D, PAGE,
        BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if not IS_SPLIT:
        places = seq * out_token_stride + heads * D
        store_heads(out_ptr + places, acc, is_row, HALF, D, BLOCK_D)
    else:
        places = (seq * tl.num_programs(1) * GROUP + heads) * num_splits + split
        store_heads(partial_ptr + places * D, acc, is_row, HALF, D, BLOCK_D)
        log_sum = largest + tl.log2(tl.where(total == 0.0, 1.0, total))  # -inf without keys
        tl.store(log_sums + places, log_sum, mask=is_row)


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    out_ptr, partial_ptr, log_sums, out_token_stride, num_splits,
    D: tl.constexpr, MOST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Combines the splits of one head of one sequence, weighted by the mass of their keys."""
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
