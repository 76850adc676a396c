"""ActiveAdapters: which rows of a pass have which adapter. The runner sets it before a pass; the
matrices that adapters change read it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.basic_layers.linear import plain_linear
from mmdeploy_llm.errors import EngineError

from .attach import Lookup, Rows
from .product import Change, Group, add_low_rank

NO_SLOT = -1


class ActiveAdapters:
    """The adapters of one pass, by rows. The runner is its only writer.

    groups: rows that follow one another and have the same adapter; none for rows without one.
    num_rows: rows of the pass; None where all have the same adapter, however many there are.
    """

    def __init__(self) -> None:
        self.groups: tuple[Group, ...] = ()
        self.num_rows: int | None = None
        self.slots: frozenset[int] = frozenset()

    def set(self, counts: Sequence[int], slots: Sequence[int]) -> None:
        """Begins a pass of items with `counts` rows each, with the adapters in `slots`."""
        if len({*slots}) < 2:
            self.set_all(slots[0] if slots else NO_SLOT)
            return
        groups, at = list[Group](), 0
        for slot, items in groupby(zip(slots, counts, strict=True), key=lambda item: item[0]):
            start, at = at, at + sum(count for _, count in items)
            if slot != NO_SLOT:
                groups.append(Group(rows=slice(start, at), slot=slot))
        self.groups, self.num_rows = tuple(groups), at
        self.slots = frozenset(group.slot for group in groups)

    def set_all(self, slot: int = NO_SLOT) -> None:
        """Begins a pass all rows of which have the same adapter, or none."""
        self.groups = () if slot == NO_SLOT else (Group(rows=slice(None), slot=slot),)
        self.num_rows, self.slots = None, frozenset(group.slot for group in self.groups)

    def groups_of(self, num_rows: int) -> tuple[Group, ...]:
        """Returns the groups of a product with so many rows. Raises EngineError where they are not
        those of the pass."""
        if self.num_rows is not None and self.num_rows != num_rows:
            raise EngineError(
                f"a layer that adapters change computes {num_rows} rows, and the step has "
                f"{self.num_rows}: which rows have an adapter is unknown; use one adapter at a time"
            )
        return self.groups

    @contextmanager
    def of_rows(self, rows: slice | Tensor | NDArray[np.int64]) -> Iterator[None]:
        """Makes these rows of the pass all that there are, in this order."""
        if self.num_rows is None:
            yield
            return
        before = self.groups, self.num_rows, self.slots
        own = np.full(self.num_rows, NO_SLOT)
        for group in self.groups:
            own[group.rows] = group.slot
        chosen = own[rows.cpu().numpy() if isinstance(rows, Tensor) else rows]
        self.set([1] * len(chosen), chosen.tolist())
        try:
            yield
        finally:
            self.groups, self.num_rows, self.slots = before


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """What an adapter changes of one matrix, on the device. weights, biases: rows of it, and of its
    bias, that take the place of its own; a weight's bias is in it."""

    change: Change | None = None
    weights: tuple[Rows, ...] = ()


@dataclass(slots=True, eq=False)
class MatrixAdapters:
    """The changes of one matrix by all adapters in memory, by slot; see linear.Adapted."""

    step: ActiveAdapters
    effects: dict[int, Effect] = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        """Whether an adapter of this pass changes the matrix."""
        return not self.step.slots.isdisjoint(self.effects)

    def changed(self, out: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Changes the product `out` [..., n] of x [..., k], in place where it can."""
        if not self.is_active:
            return out
        flat, rows = out.reshape(-1, out.shape[-1]), x.reshape(-1, x.shape[-1])
        groups = self.step.groups_of(len(rows))
        for group in groups:
            effect = self.effects.get(group.slot)
            for own in () if effect is None else effect.weights:
                columns = slice(own.start, own.start + len(own.values))
                part = None if bias is None else bias[columns]
                flat[group.rows, columns] = plain_linear(rows[group.rows], own.values, part)
        changes = {
            slot: effect.change
            for slot, effect in self.effects.items()
            if effect.change is not None
        }
        add_low_rank(flat, rows, groups, changes)
        return flat.view(out.shape)

    def of_rows(self, rows: slice | Tensor) -> object:
        """See ActiveAdapters."""
        return self.step.of_rows(rows)


@dataclass(slots=True, eq=False)
class LookupAdapters:
    """The changes of one embedding by all adapters in memory, by slot."""

    step: ActiveAdapters
    lookups: dict[int, Lookup] = field(default_factory=dict)

    def changed(self, out: Tensor, token_ids: Tensor) -> Tensor:
        """Changes the rows `out` [T, hidden] of these tokens."""
        for group in self.step.groups_of(len(out)):
            lookup = self.lookups.get(group.slot)
            if lookup is not None:
                _look_up(lookup, out[group.rows], token_ids[group.rows])
        return out


def _look_up(lookup: Lookup, out: Tensor, token_ids: Tensor) -> None:
    if lookup.ids is not None and lookup.rows is not None and len(lookup.ids):
        at = (token_ids[:, None] == lookup.ids).int().argmax(1)
        is_own = lookup.ids[at] == token_ids
        out[is_own] = lookup.rows[at[is_own]].to(out.dtype)
    if lookup.a is not None and lookup.b is not None:
        change = lookup.a[token_ids].float() @ lookup.b.float().T
        out.copy_(out.float().add_(change, alpha=lookup.scale))


@dataclass(slots=True, eq=False)
class ExpertAdapters:
    """The changes of a stack of experts, by parameter and expert; see linear.Adapted."""

    step: ActiveAdapters
    matrices: dict[tuple[str, int], MatrixAdapters] = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        """Whether an adapter of this pass changes any of them."""
        return any(own.is_active for own in self.matrices.values())

    def changed(self, name: str, expert: int, out: Tensor, x: Tensor) -> Tensor:
        """Changes a product of one expert, as MatrixAdapters does."""
        own = self.matrices.get((name, expert))
        return out if own is None else own.changed(out, x, None)

    def of_rows(self, rows: slice | Tensor) -> object:
        """See ActiveAdapters."""
        return self.step.of_rows(rows)
