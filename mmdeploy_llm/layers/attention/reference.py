"""The reference backend: plain torch on any device, for mixed prefill and decode batches.

Shapes: T tokens, B sequences, H query heads, K key/value heads, G = H // K, D head size,
L context length, counted from the first block inside the window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from mmdeploy_llm.forward import Alibi, AttentionContext, SequenceRows
from mmdeploy_llm.hooks.objects.attention import (
    AttentionBackend,
    BatchLayout,
    KVCache,
    without_spans,
)

from .gathered import Calls, Chunk, DecodeGroup, Slots, stored
from .int4 import Int4Context
from .scores import Scores
from .writing import write_plain

# Decode sequences share a group until padding would make their gathered context this many times
# larger than needed.
MAX_PADDING = 1.5


class ReferenceAttention(AttentionBackend):
    """Gathers each sequence's context by its block table and calls torch's
    scaled_dot_product_attention.

    Decode sequences of similar context length share one call; each prefill chunk has its own,
    because torch has no varlen attention for CPUs.
    """

    name = "reference"
    can_capture = False

    def begin(self, layout: BatchLayout, cache: KVCache) -> AttentionContext:
        """Returns the attention of one step; layers of equal windows share index tensors."""
        if cache.key_scales is not None:
            return Int4Context(layout, cache, ReferenceContext)
        return ReferenceContext(layout, cache)


def _decode_groups(
    layout: BatchLayout, block_size: int, window: int | None
) -> tuple[DecodeGroup, ...]:
    """Groups decode sequences by context length, longest first; a new group starts where padding
    would exceed MAX_PADDING."""
    skipped = [_first_block(n - 1, window, block_size) for n in layout.context_lens]
    lens = [n - s * block_size for n, s in zip(layout.context_lens, skipped, strict=True)]
    in_spans = _in_spans(layout)
    alone = [row for row in range(layout.num_decode) if row not in in_spans]
    order = sorted(alone, key=lambda row: -lens[row])
    groups, begin, needed = [], 0, 0
    for index, row in enumerate(order):
        padded = lens[order[begin]] * (index - begin + 1)
        if index > begin and padded > MAX_PADDING * (needed + lens[row]):
            groups.append(order[begin:index])
            begin, needed = index, 0
        needed += lens[row]
    if order:
        groups.append(order[begin:])
    return tuple(_group(rows, lens, skipped, layout, block_size, window) for rows in groups)


def _in_spans(layout: BatchLayout) -> frozenset[int]:
    """Returns the sequences with a span. Even one with a single token is not a decode sequence: the
    token attends to its whole span, however short the window."""
    return frozenset(sequence for sequence, _, _ in layout.spans)


def _first_block(token: int, window: int | None, block_size: int) -> int:
    """Returns the index of the first block that `token` attends to."""
    return 0 if window is None else max(0, token + 1 - window) // block_size


def _group(
    rows: list[int],
    lens: list[int],
    skipped: list[int],
    layout: BatchLayout,
    block_size: int,
    window: int | None,
) -> DecodeGroup:
    device, length = layout.slots.device, lens[rows[0]]
    indices = torch.tensor(rows, device=device)
    own = torch.tensor([lens[row] for row in rows], device=device)[:, None]
    num_blocks = -(-length // block_size)
    tokens = torch.arange(length, device=device)
    mask = tokens < own
    tables = layout.block_tables[indices]
    first = torch.tensor([skipped[row] for row in rows], device=device)[:, None]
    if window is None:
        tables = tables[:, :num_blocks]
    else:
        mask = mask & (tokens >= own - window)
        blocks = first + torch.arange(num_blocks, device=device)
        tables = tables.gather(1, blocks.clamp(max=tables.shape[1] - 1))
    mask, first = mask[:, None, None, :], first * block_size
    return DecodeGroup(rows=indices, tables=tables, mask=mask, first=first, length=length)


def _chunks(layout: BatchLayout, block_size: int, window: int | None) -> tuple[Chunk, ...]:
    chunks, starts = [], [0, *accumulate(layout.query_lens)]
    in_spans = _in_spans(layout)
    for row, start in enumerate(starts[:-1]):
        if row < layout.num_decode and row not in in_spans:
            continue
        count, end = layout.query_lens[row], layout.context_lens[row]
        spans = [(begin, stop) for sequence, begin, stop in layout.spans if sequence == row]
        first_token = min([end - count, *(begin for begin, _ in spans)])
        skipped = _first_block(first_token, window, block_size)
        base = skipped * block_size
        is_own = end == count
        is_plain = is_own and not spans and (window is None or window >= end)
        if is_own:
            base = 0
        mask = None if is_plain else _mask(end - count, end, base, window, spans)
        chunks.append(
            Chunk(
                start=start,
                end=start + count,
                length=end - base,
                table=layout.block_tables[row, base // block_size : -(-end // block_size)],
                mask=mask if mask is None else mask.to(layout.slots.device),
                is_own=is_own,
                first=base,
            )
        )
    return tuple(chunks)


def _mask(
    start: int, end: int, base: int, window: int | None, spans: list[tuple[int, int]]
) -> Tensor:
    """Returns [end - start, end - base] bool: whether each of the tokens start .. end (rows)
    attends to each of the tokens base .. end (columns)."""
    queries, keys = torch.arange(start, end)[:, None], torch.arange(base, end)
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    for begin, stop in spans:
        mask |= (queries >= begin) & (queries < stop) & (keys >= begin) & (keys < stop)
    return mask


class ReferenceContext:
    """Computes the attention of one step."""

    def __init__(self, layout: BatchLayout, cache: KVCache) -> None:
        self._layout = layout
        self._cache = cache
        self._calls: dict[int | None, Calls] = {}  # by window
        self._slots = Slots(layout, cache.block_size)

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
        """Stores `k`, `v` [T, K, D] and returns attention of `q` [T, H, D] as [T, H, D]; see
        forward.AttentionContext."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        if k is not None and v is not None:
            write_plain(k, v, keys, values, self._layout)
        calls = self._for_window(window)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores, heads = Scores(scale=scale, softcap=softcap, sinks=sinks), keys.shape[2]
        out = q.new_empty(*q.shape[:-1], values.shape[-1])
        for group in calls.groups:
            own = scores if alibi is None else replace(scores, biases=group.biases(alibi, heads))
            out.index_copy_(0, group.rows, _attend_group(group, q, keys, values, own))
        for chunk in calls.chunks:
            rows = slice(chunk.start, chunk.end)
            own = scores if alibi is None else replace(scores, biases=chunk.biases(alibi, heads))
            if chunk.is_own and k is not None and v is not None:
                context_k, context_v = k[rows], v[rows]
            else:
                context_k = _gather(keys, chunk.table, chunk.length).to(q.dtype)
                context_v = _gather(values, chunk.table, chunk.length).to(q.dtype)
            out[rows] = _attend_chunk(q[rows], context_k, context_v, chunk.mask, own)
        return out

    def causal(self) -> AttentionContext:
        """See forward.AttentionContext."""
        return without_spans(self, ReferenceAttention(), self._layout, self._cache)

    @cached_property
    def sequences(self) -> tuple[SequenceRows, ...]:
        """See forward.SequenceAttention."""
        counts, lens = self._layout.query_lens, self._layout.context_lens
        return tuple(
            SequenceRows(start=end - count, end=end, num_cached=length - count)
            for end, count, length in zip(accumulate(counts), counts, lens, strict=True)
        )

    def extend(
        self, sequence: int, layer: int, k: Tensor, v: Tensor, num_kept: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """See forward.SequenceAttention."""
        rows = self.sequences[sequence]
        slots = self._layout.slots[rows.start : rows.end]
        first = 0 if num_kept is None else max(0, rows.num_cached - num_kept)
        end, size = self._layout.context_lens[sequence], self._cache.block_size
        table = self._layout.block_tables[sequence, first // size : -(-end // size)]
        base = first // size * size
        found = []
        for new, cache in ((k, self._cache.keys[layer]), (v, self._cache.values[layer])):
            cache.flatten(0, 1).index_copy_(0, slots, new.to(cache.dtype))
            found.append(_gather(cache, table, end - base)[first - base :].to(new.dtype))
        return found[0], found[1]

    def extend_each(
        self,
        sequences: Sequence[int],
        layer: int,
        k: Tensor,
        v: Tensor,
        num_kept: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """See forward.SideBySideAttention."""
        slots, cache = self._slots.of(sequences, num_kept), self._cache
        return stored(k, cache.keys[layer], slots), stored(v, cache.values[layer], slots)

    def _for_window(self, window: int | None) -> Calls:
        if window not in self._calls:
            size = self._cache.block_size
            self._calls[window] = Calls(
                groups=_decode_groups(self._layout, size, window),
                chunks=_chunks(self._layout, size, window),
            )
        return self._calls[window]


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """Returns the first `length` rows of a context, [length, K, D], from `cache` [N, P, K, D] by
    the blocks of `table` [M]."""
    return cache.index_select(0, table).flatten(0, 1)[:length]


def _attend_group(
    group: DecodeGroup, q: Tensor, keys: Tensor, values: Tensor, scores: Scores
) -> Tensor:
    """Returns attention of one token of each of B sequences, [B, H, D]. The G query heads of a key
    head are the query rows of one product."""
    num_seqs, num_kv_heads = group.rows.shape[0], keys.shape[2]
    shape = (num_seqs, -1, *keys.shape[2:])
    tables = group.tables.flatten()
    context_k = keys.index_select(0, tables).view(shape)[:, : group.length].to(q.dtype)
    context_v = values.index_select(0, tables).view(shape)[:, : group.length].to(q.dtype)
    for context in (context_k, context_v):  # others' rows may be NaN, and 0 * NaN is NaN
        context.masked_fill_(~group.mask.view(num_seqs, -1, 1, 1), 0)
    rows_q = q.index_select(0, group.rows).view(num_seqs, num_kv_heads, -1, q.shape[-1])
    scores = scores.viewed(num_kv_heads, -1, 1)
    out = scores.attend(rows_q, context_k.transpose(1, 2), context_v.transpose(1, 2), group.mask)
    return out.reshape(num_seqs, q.shape[1], -1)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: Scores) -> Tensor:
    """Returns attention of `q` [n, H, D] over `k`, `v` [L, K, D], [n, H, D]. Key heads are the
    batch axis, so that no key head is copied for each of its query heads."""
    count, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = (num_kv_heads, num_heads // num_kv_heads, k.shape[0], head_dim)
    out = scores.viewed(num_kv_heads, -1, 1, 1).attend(
        q.view(count, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3),
        k.transpose(0, 1)[:, None].expand(grouped),
        v.transpose(0, 1)[:, None].expand(grouped),
        mask,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(count, num_heads, -1)
