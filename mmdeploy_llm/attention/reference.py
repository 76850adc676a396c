"""The reference backend: plain torch on any device, for mixed prefill and decode batches.

Shapes: T tokens, B sequences, H query heads, K key/value heads, G = H // K, D head size,
L context length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import BatchLayout, KVCache

# A decode group is split where padding would make its gathered context this much larger than
# needed.
MAX_PADDING = 1.5


class ReferenceAttention:
    """Gathers each sequence's context by its block table and calls torch's
    scaled_dot_product_attention.

    Decode sequences of similar context length share one call; each prefill chunk has its own,
    because
    torch offers no varlen attention for CPUs.
    """

    name = "reference"

    def begin(self, layout: BatchLayout, cache: KVCache) -> ReferenceContext:
        """Index tensors of the step, shared by all layers."""
        return ReferenceContext(
            cache, layout.slots, _decode_groups(layout, cache), _chunks(layout, cache)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DecodeGroup:
    """Decode sequences whose contexts are gathered together. rows [B], tables [B, M], mask [B,
    1, 1, L]."""

    rows: Tensor
    tables: Tensor
    mask: Tensor
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """One prefill chunk: its tokens are rows start..end; mask [n, L] is None when it has no
    earlier context."""

    start: int
    end: int
    length: int
    table: Tensor
    mask: Tensor | None


def _decode_groups(layout: BatchLayout, cache: KVCache) -> tuple[_DecodeGroup, ...]:
    """Decode sequences by context length, longest first, cut where padding would exceed
    MAX_PADDING."""
    device, lens = layout.slots.device, layout.context_lens
    order = sorted(range(layout.num_decode), key=lambda row: -lens[row])
    groups, begin, needed = [], 0, 0
    for place, row in enumerate(order):
        padded = lens[order[begin]] * (place - begin + 1)
        if place > begin and padded > MAX_PADDING * (needed + lens[row]):
            groups.append(order[begin:place])
            begin, needed = place, 0
        needed += lens[row]
    if order:
        groups.append(order[begin:])
    return tuple(_group(rows, lens, layout, cache.block_size, device) for rows in groups)


def _group(
    rows: list[int],
    lens: tuple[int, ...],
    layout: BatchLayout,
    block_size: int,
    device: torch.device,
) -> _DecodeGroup:
    length = lens[rows[0]]
    places = torch.tensor(rows, device=device)
    own = torch.tensor([lens[row] for row in rows], device=device)
    num_blocks = -(-length // block_size)
    return _DecodeGroup(
        rows=places,
        tables=layout.block_tables[places, :num_blocks],
        mask=(torch.arange(length, device=device) < own[:, None])[:, None, None, :],
        length=length,
    )


def _chunks(layout: BatchLayout, cache: KVCache) -> tuple[_Chunk, ...]:
    chunks, start = [], layout.num_decode
    for row in range(layout.num_decode, len(layout.query_lens)):
        count, length = layout.query_lens[row], layout.context_lens[row]
        num_blocks = -(-length // cache.block_size)
        mask = None
        if length > count:
            mask = torch.ones(count, length, dtype=torch.bool, device=layout.slots.device)
            mask = mask.tril(length - count)
        table = layout.block_tables[row, :num_blocks]
        chunks.append(_Chunk(start=start, end=start + count, length=length, table=table, mask=mask))
        start += count
    return tuple(chunks)


class ReferenceContext:
    """Attention of one step."""

    def __init__(
        self,
        cache: KVCache,
        slots: Tensor,
        groups: tuple[_DecodeGroup, ...],
        chunks: tuple[_Chunk, ...],
    ) -> None:
        self._cache = cache
        self._slots = slots
        self._groups = groups
        self._chunks = chunks

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`q` [T, H, D], `k` and `v` [T, K, D] -> [T, H, D]; see forward.AttentionContext."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self._slots, k.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, self._slots, v.to(values.dtype))
        out = torch.empty_like(q)
        for group in self._groups:
            out.index_copy_(0, group.rows, _attend_group(group, q, keys, values))
        for chunk in self._chunks:
            own = slice(chunk.start, chunk.end)
            if chunk.mask is None:
                context_k, context_v = k[own], v[own]
            else:
                context_k = _gather(keys, chunk.table, chunk.length).to(q.dtype)
                context_v = _gather(values, chunk.table, chunk.length).to(q.dtype)
            out[own] = _attend_chunk(q[own], context_k, context_v, chunk.mask)
        return out


def _gather(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """[N, P, K, D] by table [M] -> [length, K, D]."""
    return cache.index_select(0, table).flatten(0, 1)[:length]


def _attend_group(group: _DecodeGroup, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query token each of B sequences. The G query heads of a key head act as its queries."""
    num_seqs, num_kv_heads = group.rows.shape[0], keys.shape[2]
    shape = (num_seqs, -1, *keys.shape[2:])
    tables = group.tables.flatten()
    context_k = keys.index_select(0, tables).view(shape)[:, : group.length].to(q.dtype)
    context_v = values.index_select(0, tables).view(shape)[:, : group.length].to(q.dtype)
    rows_q = q.index_select(0, group.rows).view(num_seqs, num_kv_heads, -1, q.shape[-1])
    out = F.scaled_dot_product_attention(
        rows_q, context_k.transpose(1, 2), context_v.transpose(1, 2), attn_mask=group.mask
    )
    return out.reshape(num_seqs, *q.shape[1:])


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`q` [n, H, D] over `k`, `v` [L, K, D]. Key heads take the batch place, so none is copied
    per query head."""
    count, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    grouped = (num_kv_heads, num_heads // num_kv_heads, k.shape[0], head_dim)
    out = F.scaled_dot_product_attention(
        q.view(count, num_kv_heads, -1, head_dim).permute(1, 2, 0, 3),
        k.transpose(0, 1)[:, None].expand(grouped),
        v.transpose(0, 1)[:, None].expand(grouped),
        attn_mask=mask,
        is_causal=mask is None,
    )
    return out.permute(2, 0, 1, 3).reshape(count, num_heads, head_dim)
