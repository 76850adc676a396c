"""Adds the low-rank changes of adapters to the product of a matrix, in plain torch: what kernels
are compared with, and what computes where there are none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mmdeploy_llm.kernels import Kernels
from mmdeploy_llm.kernels.low_rank import Change, LowRankTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows of a step that have the same adapter. slot: its number in the table of adapters."""

    rows: slice
    slot: int


class PlainTable:
    """Implements kernels.low_rank.LowRankTable in plain torch."""

    def __init__(self) -> None:
        self._changes: dict[int, Change] = {}

    def put(self, slot: int, change: Change | None) -> None:
        if change is None:
            self._changes.pop(slot, None)
        else:
            self._changes[slot] = change

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        add_low_rank(out, x, list(groups_of(slots)), self._changes)


def table_of(
    kernels: Kernels | None, num_slots: int, starts: Sequence[int], k: int, dtype: torch.dtype
) -> LowRankTable:
    """Returns a table of the changes of one matrix, compiled where `kernels` have it; see
    kernels.low_rank.LowRankKernels."""
    makers = None if kernels is None else kernels.adapters
    table = None if makers is None else makers.low_rank_table(num_slots, starts, k, dtype)
    return PlainTable() if table is None else table


def groups_of(slots: Tensor) -> Iterator[Group]:
    """Yields adjacent rows that have the same adapter, none for -1. slots: [T]."""
    values, counts = torch.unique_consecutive(slots, return_counts=True)
    first = 0
    for slot, count in zip(values.tolist(), counts.tolist(), strict=True):
        if slot >= 0:
            yield Group(rows=slice(first, first + count), slot=slot)
        first += count


def add_low_rank(
    out: Tensor, x: Tensor, groups: Sequence[Group], changes: Mapping[int, Change]
) -> None:
    """Changes `out` [T, n], the product of x [T, k], in place for the rows of each group whose slot
    is in `changes`. Sums are in float32 and are rounded once."""
    for group in groups:
        change = changes.get(group.slot)
        if change is not None:
            _add(out[group.rows], x[group.rows].float(), change)


def _add(out: Tensor, x: Tensor, change: Change) -> None:
    hidden = x @ change.a.float().T
    parts = torch.split(hidden, change.b.shape[1], -1)
    wide = out.float()
    for inner, scale, (start, end) in zip(
        parts, change.scales, pairwise(change.starts), strict=True
    ):
        wide[:, start:end] += scale * (inner @ change.b[start:end].float().T)
    if change.factor is not None:
        wide *= change.factor
    if change.shift is not None:
        wide += change.shift
    out.copy_(wide)
