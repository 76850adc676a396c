"""CrossItems: attention of a step's tokens to the keys and values of their requests' encoder items.

    rows    [a a a | b | c]     query tokens of requests a, b and c
    items   [  A   | B | B]     b and c have the same item, so one call computes both

Every token sees all keys of its items, so that nothing depends on where a prompt was split, and
items of different lengths need no padding. Shapes: T tokens, L tokens of an item, H heads, K
key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from mmdeploy_llm.kernels import Kernels, VisibleKeys


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossRun:
    """Rows start .. end of a step, which attend to the same items. kept: keys and values
    [layers, 2, L, K, D]. visible: all of them, for the kernels."""

    start: int
    end: int
    kept: Tensor
    visible: VisibleKeys


class CrossItems:
    """The items of one step; see forward.CrossContext."""

    def __init__(
        self, requests: Sequence[tuple[int, Sequence[str]]], kept: Callable[[str], Tensor]
    ) -> None:
        """requests: the tokens of each request in the step, and the keys of its items. kept: key ->
        keys and values, see caches.CrossKV."""
        self._runs: list[CrossRun] = []
        self._is_whole = True  # every token has an item
        row = 0
        for keys, group in groupby(requests, key=lambda request: tuple(request[1])):
            start, row = row, row + sum(count for count, _ in group)
            if not keys:
                self._is_whole = False
                continue
            own = kept(keys[0]) if len(keys) == 1 else torch.cat([kept(key) for key in keys], 2)
            self._runs.append(_run(start, row, own))

    def attend(
        self, layer: int, q: Tensor, kernels: Kernels | None = None, *, scale: float | None = None
    ) -> Tensor:
        """See forward.CrossContext."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if len(self._runs) == 1 and self._is_whole:
            return _attend(q, self._runs[0], layer, kernels, scale)
        out = torch.empty_like(q) if self._is_whole else torch.zeros_like(q)
        for run in self._runs:
            rows = slice(run.start, run.end)
            out[rows] = _attend(q[rows], run, layer, kernels, scale)
        return out


def _run(start: int, end: int, kept: Tensor) -> CrossRun:
    """Builds a run; to the kernels an item is a cache of one page."""
    num_rows, num_keys = end - start, kept.shape[2]
    visible = VisibleKeys(
        query_starts=torch.tensor([0, num_rows]),
        first_visible=torch.zeros(num_rows, dtype=torch.int64),
        end_visible=torch.full((num_rows,), num_keys),
        block_tables=torch.zeros((1, 1), dtype=torch.int32),
    )
    return CrossRun(start=start, end=end, kept=kept, visible=visible)


def _attend(q: Tensor, run: CrossRun, layer: int, kernels: Kernels | None, scale: float) -> Tensor:
    """Computes the rows of a run, [n, H, D] -> [n, H, D]."""
    keys, values = run.kept[layer].unbind()
    own = None if kernels is None else kernels.attention
    if own is not None and own.can_attend(q, keys, values):
        return own.attend(q, keys[None], values[None], run.visible, scale=scale)
    q, keys, values = (x.transpose(0, 1)[None] for x in (q, keys, values))
    is_grouped = q.shape[1] > keys.shape[1]
    out = F.scaled_dot_product_attention(q, keys, values, scale=scale, enable_gqa=is_grouped)
    return out[0].transpose(0, 1)
