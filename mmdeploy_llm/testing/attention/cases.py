"""Random steps over a paged cache, and their plain attention in float64.

Shapes: T tokens of the step, H query heads, K key heads, D head size, N blocks, P tokens in a
block, L tokens of a sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.forward import Alibi
from mmdeploy_llm.hooks.objects.attention import BatchLayout, KVCache

GARBAGE = 7.0  # in places that belong to no token of the step
# Rounding of queries, keys, values and weights.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

Span = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a step: query_lens tokens after `earlier` ones of each sequence, decode first."""

    query_lens: tuple[int, ...]
    earlier: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 4
    spans: tuple[Span, ...] = ()

    @property
    def totals(self) -> tuple[int, ...]:
        """Tokens of each sequence after the step."""
        return tuple(n + e for n, e in zip(self.query_lens, self.earlier, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step: rows q [T, H, D], k, v [T, K, D], and its cache of one layer. known: keys and values
    [L, K, D] of each sequence, those of this step included."""

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    cache: KVCache
    layout: BatchLayout
    known: tuple[tuple[Tensor, Tensor], ...]

    def expected(self, **options: Any) -> Tensor:
        """Returns plain attention [T, H, D], float64."""
        found = []
        for number, q in enumerate(split(self.q, self.shape.query_lens)):
            spans = [(a, b) for sequence, a, b in self.layout.spans if sequence == number]
            found.append(plain(q, *self.known[number], spans=spans, **options))
        return torch.cat(found)


def split(rows: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Returns the rows of each sequence."""
    ends = list(accumulate(counts))
    return [rows[end - count : end] for end, count in zip(ends, counts, strict=True)]


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Alibi | None = None,
    spans: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """Returns attention of the last tokens q [n, H, D] of a sequence with keys and values k, v
    [L, K, D], in float64. spans: tokens that see each other in both directions."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k)
    scores *= q.shape[-1] ** -0.5 if scale is None else scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    queries = torch.arange(len(k) - len(q), len(k), device=q.device)[:, None]
    keys = torch.arange(len(k), device=q.device)[None]
    if alibi is not None:
        scores = scores + alibi.biases(keys)
    mask = keys <= queries
    if window is not None:
        mask = mask & (keys > queries - window)
    for start, end in spans:
        is_own = (queries >= start) & (queries < end)
        mask = mask | (is_own & (keys >= start) & (keys < end))
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("hnl,lhd->nhd", scores.softmax(-1)[..., : len(k)], v)


def make_step(
    shape: Shape,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    garbage: float = GARBAGE,
) -> Step:
    """Returns a random step. Its blocks are scattered; block 0, with which tables are padded, is
    nobody's. garbage: fills what is no token's."""
    draw = torch.Generator().manual_seed(seed)
    size = shape.block_size
    needs = [-(-total // size) for total in shape.totals]
    free = (torch.randperm(sum(needs) + len(needs), generator=draw) + 1).tolist()
    tables = torch.zeros(len(needs), max(needs) + 1, dtype=torch.int32)
    pages = (len(free) + 1, size, shape.kv_heads, shape.head_dim)
    keys, values = torch.full(pages, garbage), torch.full(pages, -garbage)

    def noise(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, shape.head_dim, generator=draw).to(dtype)

    known, slots = [], []
    for number, total in enumerate(shape.totals):
        own = torch.tensor([free.pop() for _ in range(needs[number])])
        tables[number, : len(own)] = own
        tables[number, len(own)] = free.pop() if number % 2 else 0  # one for later, or padding
        k, v = noise(total, shape.kv_heads), noise(total, shape.kv_heads)
        tokens = torch.arange(total)
        places, before = own[tokens // size] * size + tokens % size, shape.earlier[number]
        keys.flatten(0, 1)[places[:before]] = k[:before].float()
        values.flatten(0, 1)[places[:before]] = v[:before].float()
        slots.append(places[before:])
        known.append((k.to(device), v.to(device)))
    new_k, new_v = (
        torch.cat([pair[which][e:] for pair, e in zip(known, shape.earlier, strict=True)])
        for which in (0, 1)
    )
    return Step(
        shape=shape,
        q=noise(sum(shape.query_lens), shape.heads).to(device),
        k=new_k,
        v=new_v,
        cache=KVCache(keys=(keys.to(device, dtype),), values=(values.to(device, dtype),)),
        layout=_layout(shape, tables.to(device), torch.cat(slots).to(device)),
        known=tuple(known),
    )


def _layout(shape: Shape, tables: Tensor, slots: Tensor) -> BatchLayout:
    return BatchLayout(
        num_decode=sum(1 for count in shape.query_lens if count == 1),
        query_lens=shape.query_lens,
        context_lens=shape.totals,
        block_tables=tables,
        slots=slots,
        spans=shape.spans,
    )


def random_shape(seed: int, *, head_dim: int, block_multiple: int) -> Shape:
    """Returns the sizes of a step of prefill, decode or both, after nothing, after whole blocks, or
    inside one; query heads are 1 to 8 for a key head."""
    draw = random.Random(seed)
    kv_heads, ratio = draw.choice((1, 2, 3)), draw.choice((1, 2, 3, 4, 8))
    size = block_multiple * draw.choice((1, 2, 4, 7, 16))
    num_decode, num_prefill = ((0, 2), (3, 0), (2, 2), (1, 1), (0, 1), (5, 0))[seed % 6]
    lens = [1] * num_decode + [draw.randint(2, 23) for _ in range(num_prefill)]
    earlier = []
    for count in lens:
        kind = draw.choice(("none", "blocks", "full", "any"))
        whole = size * draw.randint(1, 2)
        known = {"none": 0, "blocks": whole, "full": -count % size, "any": draw.randint(1, 60)}
        earlier.append(known[kind])
    return Shape(
        query_lens=tuple(lens),
        earlier=tuple(earlier),
        heads=kv_heads * ratio,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=size,
    )
