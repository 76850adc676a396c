"""ActiveAdapters: which rows of a pass have which adapter. The runner sets it before a pass; the
matrices that adapters change read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from mmdeploy_llm.errors import EngineError
from mmdeploy_llm.kernels import plain
from mmdeploy_llm.kernels.low_rank import ExpertChanges, LowRankTable

NO_SLOT = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Values for the rows `start` .. of a matrix, or of its bias."""

    start: int
    values: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Says what an adapter changes of an embedding: the row of a token becomes row +
    scale * (b a)[:, token]. a: [vocab, r], b: [hidden, r]. ids, rows: tokens, ascending, whose rows
    are others; without ids, all rows."""

    a: Tensor | None = None
    b: Tensor | None = None
    scale: float = 1.0
    ids: Tensor | None = None
    rows: Tensor | None = None

    def to(self, device: torch.device) -> Lookup:
        """Returns the same on a device."""
        own = (self.a, self.b, self.ids, self.rows)
        a, b, ids, rows = (None if each is None else each.to(device) for each in own)
        return replace(self, a=a, b=b, ids=ids, rows=rows)


class ActiveAdapters:
    """The adapters of one pass, by rows; see forward.AdapterRows. The runner is its only writer.

    slots: [T] int32, the slot of each row's adapter; None where all rows have that of `all_slot`,
    however many they are. active: slots of all rows.
    """

    def __init__(self, device: torch.device) -> None:
        self.slots: Tensor | None = None
        self.all_slot = NO_SLOT
        self.active: frozenset[int] = frozenset()
        self.frame: object | None = None
        self._device = device
        self._full: dict[tuple[int, int], Tensor] = {}

    def set(self, counts: Sequence[int], slots: Sequence[int], frame: object | None = None) -> None:
        """Begins a pass of items with `counts` rows each, with the adapters in `slots`. frame: see
        forward.AdapterRows."""
        if len({*slots}) < 2 and frame is None:
            self.set_all(slots[0] if slots else NO_SLOT)
            return
        own = torch.tensor(slots, dtype=torch.int32)
        self.slots = own.repeat_interleave(torch.tensor(counts)).to(self._device)
        self.active, self.frame = frozenset(slots) - {NO_SLOT}, frame

    def set_all(self, slot: int = NO_SLOT) -> None:
        """Begins a pass all rows of which have the same adapter, or none."""
        self.slots, self.all_slot, self.frame = None, slot, None
        self.active = frozenset({slot} - {NO_SLOT})

    def slots_of(self, num_rows: int) -> Tensor:
        """Returns the slots of a product with so many rows. Raises EngineError where they are not
        those of the pass."""
        if self.slots is None:
            key = num_rows, self.all_slot
            if key not in self._full:
                self._full.clear()
                self._full[key] = torch.full((num_rows,), self.all_slot, dtype=torch.int32)
                self._full[key] = self._full[key].to(self._device)
            return self._full[key]
        if len(self.slots) != num_rows:
            raise EngineError(
                f"a layer that adapters change computes {num_rows} rows, and the step has "
                f"{len(self.slots)}: which of them have an adapter is unknown; use one at a time"
            )
        return self.slots

    @contextmanager
    def of_rows(self, rows: slice | Tensor) -> Iterator[None]:
        """Makes these rows of the pass all that there are, in this order."""
        if self.slots is None:
            yield
            return
        with self.using(self.slots[rows]):
            yield

    @contextmanager
    def using(self, slots: Tensor) -> Iterator[None]:
        """Reads the slots from this tensor within the context; see forward.AdapterRows."""
        before, self.slots = self.slots, slots
        try:
            yield
        finally:
            self.slots = before


@dataclass(slots=True, eq=False)
class MatrixAdapters:
    """The changes of one matrix by all adapters in memory; see linear.Adapted.

    table: low-rank changes, by slot; None where no adapter has one. weights: rows that take the
    place of the matrix's own, by slot.
    """

    step: ActiveAdapters
    table: LowRankTable | None = None
    weights: dict[int, tuple[Rows, ...]] = field(default_factory=dict)
    slots: set[int] = field(default_factory=set)

    @property
    def is_active(self) -> bool:
        """Whether an adapter of this pass changes the matrix."""
        return not self.step.active.isdisjoint(self.slots)

    def changed(self, out: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        """Changes the product `out` [..., n] of x [..., k], in place."""
        if not (self.is_active or (self.step.frame is not None and self.table is not None)):
            return out
        flat, rows = out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1])
        slots = self.step.slots_of(rows.shape[0])
        if not self.step.active.isdisjoint(self.weights):
            self._replace(flat, rows, bias, slots)
        if self.table is not None:
            if flat.dtype is not rows.dtype:  # an output head, whose sums are in float32
                rows = rows.to(flat.dtype)
            self.table.add(flat, rows, slots)
        return out

    def _replace(self, out: Tensor, x: Tensor, bias: Tensor | None, slots: Tensor) -> None:
        for slot in self.step.active & self.weights.keys():
            rows = (slots == slot).nonzero().flatten()
            for own in self.weights[slot]:
                columns = slice(own.start, own.start + len(own.values))
                part = None if bias is None else bias[columns]
                out[rows, columns] = plain.linear(x[rows], own.values.flatten(1), part, out.dtype)

    def of_rows(self, rows: slice | Tensor) -> object:
        """See ActiveAdapters."""
        return self.step.of_rows(rows)


@dataclass(slots=True, eq=False)
class LookupAdapters:
    """The changes of one embedding by all adapters in memory, by slot."""

    step: ActiveAdapters
    lookups: dict[int, Lookup] = field(default_factory=dict)

    def changed(self, out: Tensor, token_ids: Tensor) -> Tensor:
        """Changes the rows `out` [T, hidden] of these tokens, in place."""
        if self.step.active.isdisjoint(self.lookups):
            return out
        slots = self.step.slots_of(len(out))
        for slot in self.step.active & self.lookups.keys():
            rows = (slots == slot).nonzero().flatten()
            out[rows] = _changed(self.lookups[slot], out[rows], token_ids[rows])
        return out


def _changed(lookup: Lookup, out: Tensor, token_ids: Tensor) -> Tensor:
    if lookup.ids is None and lookup.rows is not None:
        out = lookup.rows[token_ids].to(out.dtype)
    elif lookup.ids is not None and lookup.rows is not None and len(lookup.ids):
        at = (token_ids[:, None] == lookup.ids).int().argmax(1)
        is_own = lookup.ids[at] == token_ids
        out[is_own] = lookup.rows[at[is_own]].to(out.dtype)
    if lookup.a is not None and lookup.b is not None:
        change = lookup.a[token_ids].float() @ lookup.b.float().T
        return out.float().add_(change, alpha=lookup.scale).to(out.dtype)
    return out


@dataclass(slots=True, eq=False)
class ExpertAdapters:
    """The changes of a stack of experts, by parameter and expert; see linear.Adapted."""

    step: ActiveAdapters
    matrices: dict[tuple[str, int], MatrixAdapters] = field(default_factory=dict)

    @property
    def is_active(self) -> bool:
        """Whether an adapter of this pass changes any of them."""
        return any(own.is_active for own in self.matrices.values())

    def changes_of(self, num_rows: int) -> ExpertChanges | None:
        """Returns the changes of all experts in a step of so many rows; None where the step has
        none and is not recorded for adapters."""
        if not self.is_active and self.step.frame is None:
            return None
        tables = {
            (expert, name == "down_proj"): own.table
            for (name, expert), own in self.matrices.items()
            if own.table is not None
        }
        return ExpertChanges(tables=tables, slots=self.step.slots_of(num_rows))

    def changed(self, name: str, expert: int, out: Tensor, x: Tensor) -> Tensor:
        """Changes a product of one expert, as MatrixAdapters does."""
        own = self.matrices.get((name, expert))
        return out if own is None else own.changed(out, x, None)

    def of_rows(self, rows: slice | Tensor) -> object:
        """See ActiveAdapters."""
        return self.step.of_rows(rows)
