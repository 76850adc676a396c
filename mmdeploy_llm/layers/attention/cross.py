"""CrossItems: attention of a step's tokens to the keys and values of their requests' encoder items.

    rows    [a a a | b | c]     query tokens of requests a, b and c
    items   [  A   | B | B]     b and c have the same item, so one call computes both

Every token sees all keys of the items that are meant for it, so that nothing depends on where a
prompt was split, and items of different lengths need no padding. Shapes: T tokens, L tokens of an
item, H heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.hooks.objects.attention import AttentionKernels, VisibleKeys
from mmdeploy_llm.request import MediaSpan

Items = tuple[tuple[str, int | None], ...]  # keys, and how many tokens of each, None for all


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossRequest:
    """The tokens of a request in a step, from `first` of its sequence on, and its items."""

    first: int
    count: int
    media: Sequence[MediaSpan]

    @property
    def sights(self) -> Iterator[CrossSight]:
        """Sights of its tokens, in order: cut where a view begins or ends."""
        end = self.first + self.count
        views = [span.view for span in self.media if span.view is not None]
        cuts = {cut for view in views for cut in (view.first, view.end) if cut is not None}
        inner = sorted(cut for cut in cuts if self.first < cut < end)
        for start, stop in pairwise((self.first, *inner, end)):
            seen = tuple(_seen(self.media, start))
            whole = tuple((span.item.key, None) for span in self.media)
            yield CrossSight(count=stop - start, items=seen or whole, is_blind=not seen)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossSight:
    """Items that `count` tokens see, by key, and how many tokens of each, None for all. is_blind:
    none is meant for them."""

    count: int
    items: Items
    is_blind: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossRun:
    """Rows start .. end of a step, which attend to the same items. kept: keys and values
    [layers, 2, L, K, D]. visible: all of them, for the kernels; where they lie by heads, a sequence
    for each key head."""

    start: int
    end: int
    kept: Tensor
    visible: VisibleKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedRows:
    """Rows of a step whose queries are wanted, [n], and in which layers. queries: of each of these,
    times the scale, [n, H, D], once it is computed."""

    rows: Tensor
    layers: frozenset[int]
    queries: dict[int, Tensor] = field(default_factory=dict)

    def see(self, layer: int, q: Tensor, scale: float) -> None:
        """Keeps the queries of a layer, of all rows [T, H, D]."""
        if layer in self.layers:
            self.queries[layer] = q[self.rows] * scale


def by_heads(kept: Tensor) -> Tensor:
    """Returns keys and values [layers, 2, L, K, D] with those of a head one after the other in
    memory: a decode step reads them in two thirds of the time (1,500 tokens of 8 heads of 64
    channels, Zen 3), since a processor foresees where it goes on."""
    return kept.transpose(2, 3).contiguous().transpose(2, 3)


def _are_by_heads(keys: Tensor) -> bool:
    """Whether keys [L, K, D] lie so."""
    return keys.stride(0) == keys.shape[2] < keys.stride(1)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns keys and values of several items, one after the other, that lie as those of each."""
    if _are_by_heads(parts[0][0, 0]):
        return torch.cat([part.transpose(2, 3) for part in parts], 3).transpose(2, 3)
    return torch.cat(list(parts), 2)


class JoinedItems:
    """Keys and values of several items, one after the other, which a step keeps for the next one: a
    decode step sees the items of the step before it, and would copy them all again."""

    def __init__(self) -> None:
        self._found: dict[Items, Tensor] = {}
        self._before: dict[Items, Tensor] = {}

    def begin(self) -> None:
        """Begins a step: what the one before it did not use is dropped."""
        self._before, self._found = self._found, {}

    def of(self, items: Items, kept: Callable[[str], Tensor]) -> Tensor:
        """Returns keys and values [layers, 2, L, K, D] of items, one after the other."""
        own = [kept(key)[:, :, :count] for key, count in items]
        if len(own) == 1:
            return own[0]
        known = self._found.get(items, self._before.get(items))
        self._found[items] = _joined(own) if known is None else known
        return self._found[items]


class CrossItems:
    """The items of one step; see forward.CrossContext."""

    def __init__(
        self,
        requests: Sequence[CrossRequest],
        kept: Callable[[str], Tensor],
        joined: JoinedItems | None = None,
        kernels: AttentionKernels | None = None,
        watched: WatchedRows | None = None,
    ) -> None:
        """kept: key -> keys and values, see caches.CrossKV. joined: of the step before this one.
        kernels: None where torch computes. watched: gets the queries of some rows."""
        self._requests, self._kept, self._kernels = requests, kept, kernels
        self._watched = watched
        self._joined = joined or JoinedItems()
        self._joined.begin()
        self._runs: list[CrossRun] = []
        self._blind: list[range] = []
        self._is_whole = True  # every token has an item
        row = 0
        sights = chain.from_iterable(request.sights for request in requests)
        for (items, is_blind), group in groupby(sights, key=lambda own: (own.items, own.is_blind)):
            start, row = row, row + sum(sight.count for sight in group)
            if is_blind:
                self._blind.append(range(start, row))
            if not items:
                self._is_whole = False
                continue
            self._runs.append(_run(start, row, self._joined.of(items, kept)))

    def of(self, sequence: int, layer: int) -> tuple[Tensor, Tensor] | None:
        """See forward.CrossContext."""
        items = tuple((span.item.key, None) for span in self._requests[sequence].media)
        if not items:
            return None
        keys, values = self._joined.of(items, self._kept)[layer]
        return keys, values

    @property
    def has_items(self) -> bool:
        """See forward.CrossContext."""
        return bool(self._runs)

    @cached_property
    def blind_rows(self) -> Tensor | None:
        """See forward.CrossContext."""
        rows = torch.tensor([*chain.from_iterable(self._blind)], dtype=torch.int64)
        return rows.to(self._runs[0].kept.device) if self._blind and self._runs else None

    def attend(self, layer: int, q: Tensor, *, scale: float | None = None) -> Tensor:
        """See forward.CrossContext."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self._watched is not None:
            self._watched.see(layer, q, scale)
        if len(self._runs) == 1 and self._is_whole:
            return _attend(q, self._runs[0], layer, self._kernels, scale)
        out = torch.empty_like(q) if self._is_whole else torch.zeros_like(q)
        for run in self._runs:
            rows = slice(run.start, run.end)
            out[rows] = _attend(q[rows], run, layer, self._kernels, scale)
        return out


def _seen(media: Sequence[MediaSpan], token: int) -> Iterator[tuple[str, int | None]]:
    """Yields the items that are meant for a token of the sequence, and how much of them."""
    for span in media:
        view = span.view
        if view is None:
            yield span.item.key, None
        elif view.first <= token and (view.end is None or token < view.end):
            yield span.item.key, view.num_tokens


def _run(start: int, end: int, kept: Tensor) -> CrossRun:
    """Builds a run; to the kernels an item is a cache of one page, or of one for each key head."""
    num_rows, (num_keys, num_heads) = end - start, kept.shape[2:4]
    num_pages = num_heads if _are_by_heads(kept[0, 0]) else 1
    visible = VisibleKeys(
        query_starts=torch.arange(num_pages + 1) * num_rows,
        first_visible=torch.zeros(num_pages * num_rows, dtype=torch.int64),
        end_visible=torch.full((num_pages * num_rows,), num_keys),
        block_tables=torch.arange(num_pages, dtype=torch.int32)[:, None],
    )
    return CrossRun(start=start, end=end, kept=kept, visible=visible)


def _attend(
    q: Tensor, run: CrossRun, layer: int, kernels: AttentionKernels | None, scale: float
) -> Tensor:
    """Computes the rows of a run, [n, H, D] -> [n, H, D]."""
    keys, values = run.kept[layer].unbind()
    if kernels is not None and _are_by_heads(keys):
        found = _attend_by_heads(q, keys, values, run.visible, kernels, scale)
        if found is not None:
            return found
    if kernels is not None and kernels.can_attend(q, keys, values):
        return kernels.attend(q, keys[None], values[None], run.visible, scale=scale)
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    is_grouped = q.shape[1] > keys.shape[1]
    out = F.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=is_grouped)
    return out[0].transpose(0, 1)


def _attend_by_heads(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: VisibleKeys,
    kernels: AttentionKernels,
    scale: float,
) -> Tensor | None:
    """Computes rows [n, H, D] whose keys and values lie by heads: each key head is a sequence of
    its own, with a page of its own. Returns None where the kernels cannot."""
    num_rows, num_heads = len(q), keys.shape[1]
    rows = q.view(num_rows, num_heads, -1, q.shape[2]).transpose(0, 1).flatten(0, 1)
    keys, values = _pages(keys), _pages(values)
    if not kernels.can_attend(rows, keys.flatten(0, 1), values.flatten(0, 1)):
        return None
    out = kernels.attend(rows, keys, values, visible, scale=scale)
    return out.view(num_heads, num_rows, *out.shape[1:]).transpose(0, 1).flatten(1, 2)


def _pages(part: Tensor) -> Tensor:
    """Returns keys or values [L, K, D] that lie by heads as pages [K, L, 1, D]. Where they are the
    first ones of more, a page has all of these."""
    num_heads, head_dim = part.shape[1:]
    stride = part.stride(1)
    return part.as_strided(
        (num_heads, stride // head_dim, 1, head_dim), (stride, head_dim, head_dim, 1)
    )
