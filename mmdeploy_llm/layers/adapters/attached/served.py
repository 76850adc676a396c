"""ServedAdapters: the adapters that a runner holds in memory, put at the matrices of its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.kernels import TORCH, Kernels
from mmdeploy_llm.kernels.low_rank import Change, LowRankTable
from mmdeploy_llm.layers.adapters import Group, add_low_rank, read_adapter
from mmdeploy_llm.layers.basic.adapted import (
    NO_SLOT,
    ActiveAdapters,
    ExpertAdapters,
    LookupAdapters,
    MatrixAdapters,
)
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.linear import Matrix
from mmdeploy_llm.values.adapter_ref import AdapterRef

from .attach import Blueprint
from .places import Attached, Place, Placed

logger = logging.getLogger(__name__)

NORM_ROWS = 256  # columns of a weight that are widened at once


def key_of(name: str, digest: str) -> str:
    """Returns AdapterRef.key of an adapter with this content."""
    return f"{name}@{digest}"


class ServedAdapters:
    """Adapters by key, as the scheduler has them read and freed. The runner is its only writer.

    step: which rows of a pass have which of them.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        blueprint: Callable[[], Blueprint] | None = None,
        *,
        num_slots: int = 1,
        kernels: Kernels = TORCH,
    ) -> None:
        """blueprint: of the model, made when the first adapter is read; None: none is read.
        num_slots: adapters in memory. kernels: for their products."""
        self.step = ActiveAdapters(device)
        self._model, self._new_blueprint, self._device = model, blueprint, device
        self._num_slots, self._kernels = num_slots, kernels
        self._blueprint: Blueprint | None = None
        self._slots: dict[str, int] = {}
        self._free = list(range(num_slots - 1, -1, -1))
        self._recordable: set[int] = set()  # slots of which kernels compute all changes
        self._num_tables = 0
        self._places: dict[str, list[Callable[[], object]]] = {}  # what takes an adapter away
        self._failures: dict[str, str] = {}

    def load(self, refs: Iterable[AdapterRef], raised: Callable[[BaseException], object]) -> None:
        """Reads adapters and puts them at their matrices. raised: told of each one that cannot be
        read, which `check` then raises."""
        for ref in refs:
            self._failures.pop(ref.key, None)
            try:
                self._load(ref)
            except FAULTS as error:
                raised(error)
                logger.warning("adapter %r cannot be read: %s", ref.name, error_text(error))
                self._failures[ref.key] = error_text(error)

    def check(self, key: str) -> None:
        """Raises CheckpointError where an adapter that a request needs is not in memory."""
        if key not in self._slots:
            raise CheckpointError(self._failures.get(key, "its adapter is not in memory"))

    def _load(self, ref: AdapterRef) -> None:
        if ref.key in self._slots:
            return
        adapter = read_adapter(ref.folder)
        if key_of(ref.name, adapter.digest) != ref.key:
            raise CheckpointError(
                f"the files of adapter {ref.name!r} in {ref.folder} have changed since it was "
                "loaded; load it again"
            )
        if self._blueprint is None:
            assert self._new_blueprint is not None, "a runner for adapters has a blueprint"
            self._blueprint = self._new_blueprint()
        try:
            self._put(ref.key, self._free[-1], self._blueprint.attach(adapter))
        except BaseException:  # the next adapter gets its slot
            self._take_away(ref.key)
            raise
        self._slots[ref.key] = self._free.pop()

    def unload(self, keys: Iterable[str]) -> None:
        """Frees adapters; unknown keys are ignored."""
        for key in keys:
            self._failures.pop(key, None)
            if key in self._slots:
                slot = self._slots.pop(key)
                self._free.append(slot)
                self._recordable.discard(slot)
            self._take_away(key)

    def begin(self, counts: Sequence[int], keys: Sequence[str]) -> ActiveAdapters | None:
        """Begins a pass of items with `counts` rows each; returns None where none has one."""
        if not any(keys):
            self.step.set_all()
            return None
        slots = [self._slots[key] if key else NO_SLOT for key in keys]
        is_recordable = {*slots} - {NO_SLOT} <= self._recordable
        self.step.set(counts, slots, self._num_tables if is_recordable else None)
        return self.step

    @contextmanager
    def encoding(self, key: str) -> Iterator[None]:
        """Computes with one adapter, or none, within the context, whatever the rows are."""
        self.step.set_all(self._slots.get(key, NO_SLOT))
        try:
            yield
        finally:
            self.step.set_all()

    def _put(self, key: str, slot: int, attached: Attached) -> None:
        """Puts an adapter at its matrices. Where it fails, `_take_away` removes what it put."""
        found = {place: self._completed(place, own) for place, own in attached.matrices.items()}
        undo = self._places[key] = []
        for place, placed in found.items():
            own = self._adapters_of(place)
            if placed.change is not None:
                if own.table is None:
                    own.table = self._new_table(placed)
                own.table.put(slot, placed.change)
                undo.append(partial(own.table.put, slot, None))
            if placed.weights:
                own.weights[slot] = placed.weights
                undo.append(partial(own.weights.pop, slot))
            own.slots.add(slot)
            undo.append(partial(own.slots.discard, slot))
        for path, lookup in attached.lookups.items():
            embedding: Any = self._model.get_submodule(path)
            if embedding.lookups is None:
                embedding.lookups = LookupAdapters(self.step)
            embedding.lookups.lookups[slot] = lookup.to(self._device)
            undo.append(partial(embedding.lookups.lookups.pop, slot))
        is_low_rank = not any(placed.weights for placed in found.values())
        if is_low_rank and not attached.lookups:
            self._recordable.add(slot)

    def _take_away(self, key: str) -> None:
        """Removes an adapter from its matrices, all of it or as far as it was put there."""
        for undo in self._places.pop(key, ()):
            undo()

    def _new_table(self, placed: Placed) -> LowRankTable:
        self._num_tables += 1
        assert placed.change is not None
        dtype = placed.change.a.dtype
        columns = placed.num_columns
        return self._kernels.low_rank_table(self._num_slots, placed.starts, columns, dtype)

    def _adapters_of(self, place: Place) -> MatrixAdapters:
        module: Any = self._model.get_submodule(place.module)
        is_expert = place.index >= 0
        if module.adapted is None:
            module.adapted = (ExpertAdapters if is_expert else MatrixAdapters)(self.step)
        own: MatrixAdapters = module.adapted
        if is_expert:
            key, new = (place.name, place.index), MatrixAdapters(self.step)
            own = module.adapted.matrices.setdefault(key, new)
        return own

    def _completed(self, place: Place, placed: Placed) -> Placed:
        """Returns a change with what needs the values of the model, on the device."""
        module: Any = self._model.get_submodule(place.module)
        bias = getattr(module, "bias", None) if isinstance(module, Matrix) else None
        change = placed.change
        if placed.biases and bias is not None:
            change = _with_biases(change, placed, bias)
        if change is not None:
            change = _on_device(change, self._device)
            if placed.magnitudes:
                change = _with_lengths(change, placed, module, place, bias)
        weights = (replace(own, values=own.values.to(self._device)) for own in placed.weights)
        return replace(placed, change=change, weights=tuple(weights))


def _on_device(change: Change, device: torch.device) -> Change:
    shift = None if change.shift is None else change.shift.to(device)
    return replace(change, a=change.a.to(device), b=change.b.to(device), shift=shift)


def _with_biases(change: Change | None, placed: Placed, bias: Tensor) -> Change:
    """Returns the change with what takes the place of the matrix's own bias."""
    n = len(bias)
    shift = torch.zeros(n)
    if change is not None and change.shift is not None:
        shift = change.shift.clone()
    for rows in placed.biases:
        held = slice(rows.start, rows.start + len(rows.values))
        shift[held] += rows.values.float() - bias[held].float().cpu()
    if change is None:
        num_parts = len(placed.starts) - 1
        change = Change(
            a=torch.zeros(num_parts, placed.num_columns, dtype=bias.dtype),
            b=torch.zeros(n, 1, dtype=bias.dtype),
            starts=placed.starts,
            scales=(0.0,) * num_parts,
        )
    return replace(change, shift=shift)


def _with_lengths(
    change: Change, placed: Placed, module: nn.Module, place: Place, bias: Tensor | None
) -> Change:
    """Returns the change of a DoRA: the rows of the changed weight get the lengths that the adapter
    says. Their own are those of the weight as the model has it, in few bits too."""
    n, k = len(change.b), change.a.shape[1]
    squares = torch.zeros(n, device=change.b.device)
    plain, whole = replace(change, shift=None), [Group(rows=slice(None), slot=0)]
    for start in range(0, k, NORM_ROWS):
        unit = torch.eye(k, device=change.a.device, dtype=change.a.dtype)[start : start + NORM_ROWS]
        columns = _own_product(module, place, unit).float()
        add_low_rank(columns, unit, whole, {0: plain})
        squares += columns.square().sum(0)
    factor = torch.ones(n, device=squares.device)
    for rows in placed.magnitudes:
        held = slice(rows.start, rows.start + len(rows.values))
        factor[held] = rows.values.to(factor.device) / squares[held].sqrt()
    shift = torch.zeros_like(factor) if change.shift is None else change.shift
    if bias is not None:
        shift = shift + bias.float() * (1 - factor)
    return replace(change, factor=factor, shift=shift)


def _own_product(module: nn.Module, place: Place, x: Tensor) -> Tensor:
    """Multiplies by a matrix as it is without adapters."""
    if isinstance(module, Experts):
        return module.own_product(place.name, place.index, x)
    assert isinstance(module, Matrix)
    return module.own_product(x)
