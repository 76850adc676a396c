"""Adds the low-rank changes of adapters to the product of a matrix, in plain torch: what kernels
are compared with.

T tokens, k inputs, n outputs, r rank, P parts: the matrices of the checkpoint that one matrix of
the model holds, such as q_proj, k_proj and v_proj.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Rows of a step that have the same adapter. slot: its number in the table of adapters."""

    rows: slice
    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Describes the change of one matrix [n, k] of the model by one adapter: out becomes
    (out + scale * (x a^T) b^T) * factor + shift.

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
