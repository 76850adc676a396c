"""The low-rank changes of adapters: what one changes of a matrix, and what adds it to products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
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


class LowRankKernels(Protocol):
    """Makes tables whose `add` is compiled."""

    def low_rank_table(
        self, num_slots: int, starts: Sequence[int], k: int, dtype: torch.dtype
    ) -> LowRankTable | None:
        """Returns a table for a matrix [n, k] of the parts `starts`, as Change has them, and for x
        and out of `dtype`; None where the kernels have none for it."""
