"""The low-rank changes of adapters: what one changes of a matrix, and what adds it to products, in
plain torch too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Describes the change of one matrix [n, k] of the model by one adapter: out becomes
    (out + scale * (x a^T) b^T) * factor + shift.

    r rank, P parts: the matrices of the checkpoint that the matrix of the model holds, such as
    q_proj, k_proj and v_proj.

    a: [P * r, k], the parts one after the other, each filled up to r rows with zeros.
    b: [n, r]; rows starts[p] .. starts[p + 1] belong to part p. starts: [P + 1].
    scales: [P], 0 of a part that the adapter does not change.
    factor, shift: [n] float32, of DoRA and of biases that are added; None for none.
    """

    a: Tensor
    b: Tensor
    starts: tuple[int, ...]
    scales: tuple[float, ...]
    factor: Tensor | None = None
    shift: Tensor | None = None


class LowRankTable(Protocol):
    """The changes of one matrix by the adapters that are loaded, each in its slot. The table stays
    where it is: calls that were recorded see what is put into it later."""

    def put(self, slot: int, change: Change | None) -> None:
        """Replaces the change of a slot; None: that adapter does not change the matrix. Its parts
        are those of the table."""

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """Changes `out` [T, n], the product of x [T, k], in place. slots: [T] int32, the adapter of
        each row; -1 for none. A row's result does not depend on the other rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChanges:
    """The changes of a step's experts. tables: by expert and whether it is its down matrix, or gate
    and up. slots: as in LowRankTable.add, of each token."""

    tables: Mapping[tuple[int, bool], LowRankTable]
    slots: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows of a step that have the same adapter. slot: its number in the table of adapters."""

    rows: slice
    slot: int


class PlainTable:
    """A LowRankTable in plain torch."""

    def __init__(self) -> None:
        self._changes: dict[int, Change] = {}

    def put(self, slot: int, change: Change | None) -> None:
        if change is None:
            self._changes.pop(slot, None)
        else:
            self._changes[slot] = change

    def add(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        add_low_rank(out, x, list(groups_of(slots)), self._changes)


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
