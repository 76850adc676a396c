"""ServedAdapters: the adapters that one runner holds in memory, put at the matrices of its model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.adapter_ref import AdapterRef
from mmdeploy_llm.basic_layers.linear import Matrix
from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.layers.moe import Experts

from .attach import Attached, Blueprint, Place, Placed
from .folder import read_adapter
from .product import Change, Group, add_low_rank
from .step import NO_SLOT, ActiveAdapters, Effect, ExpertAdapters, LookupAdapters, MatrixAdapters

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
        self, model: Any, blueprint: Callable[[], Blueprint] | None, device: torch.device
    ) -> None:
        """blueprint: of the model, made when the first adapter is read; None: none is read."""
        self.step = ActiveAdapters()
        self._model, self._new_blueprint, self._device = model, blueprint, device
        self._blueprint: Blueprint | None = None
        self._slots: dict[str, int] = {}
        self._places: dict[str, list[Callable[[], object]]] = {}  # what takes an adapter away
        self._num_read = 0
        self._failures: dict[str, Exception] = {}

    def load(self, ref: AdapterRef) -> None:
        """Reads an adapter and puts it at its matrices. Raises what that raises, and keeps it for
        `check`."""
        self._failures.pop(ref.key, None)
        try:
            self._load(ref)
        except Exception as error:
            self._failures[ref.key] = error.with_traceback(None)
            raise

    def check(self, key: str) -> None:
        """Raises why an adapter that a request needs is not in memory."""
        if key and key not in self._slots:
            raise self._failures.get(key) or CheckpointError("its adapter is not in memory")

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
        slot, self._num_read = self._num_read, self._num_read + 1
        self._put(ref.key, slot, self._blueprint.attach(adapter))
        self._slots[ref.key] = slot

    def unload(self, keys: Iterable[str]) -> None:
        """Frees adapters; unknown keys are ignored."""
        for key in keys:
            self._slots.pop(key, None)
            self._failures.pop(key, None)
            for take_away in self._places.pop(key, ()):
                take_away()

    def begin(self, counts: Sequence[int], keys: Sequence[str]) -> bool:
        """Begins a pass of items with `counts` rows each; returns whether one has an adapter."""
        if not self._slots:
            return False
        self.step.set(counts, [self._slots[key] if key else NO_SLOT for key in keys])
        return bool(self.step.groups)

    @contextmanager
    def encoding(self, key: str) -> Iterator[None]:
        """Computes with one adapter, or none, within the context, whatever the rows are."""
        self.step.set_all(self._slots.get(key, NO_SLOT))
        try:
            yield
        finally:
            self.step.set_all()

    def _put(self, key: str, slot: int, attached: Attached) -> None:
        effects = {place: self._effect(place, own) for place, own in attached.matrices.items()}
        undo = self._places.setdefault(key, [])
        for place, effect in effects.items():
            module: Any = self._model.get_submodule(place.module)
            own = self._adapters_of(module, place)
            own.effects[slot] = effect
            undo.append(lambda own=own: own.effects.pop(slot))
        for path, lookup in attached.lookups.items():
            embedding: Any = self._model.get_submodule(path)
            if embedding.lookups is None:
                embedding.lookups = LookupAdapters(self.step)
            values = {name: getattr(lookup, name) for name in ("a", "b", "ids", "rows")}
            on_device = {n: None if x is None else x.to(self._device) for n, x in values.items()}
            embedding.lookups.lookups[slot] = replace(lookup, **on_device)
            undo.append(lambda own=embedding.lookups: own.lookups.pop(slot))

    def _adapters_of(self, module: Any, place: Place) -> MatrixAdapters:
        if place.index < 0:
            if module.adapted is None:
                module.adapted = MatrixAdapters(self.step)
            own: MatrixAdapters = module.adapted
            return own
        if module.adapted is None:
            module.adapted = ExpertAdapters(self.step)
        found: MatrixAdapters = module.adapted.matrices.setdefault(
            (place.name, place.index), MatrixAdapters(self.step)
        )
        return found

    def _effect(self, place: Place, placed: Placed) -> Effect:
        """Completes what needs the values of the model, and moves it to the device."""
        module: Any = self._model.get_submodule(place.module)
        bias = getattr(module, "bias", None) if isinstance(module, Matrix) else None
        change, weights = placed.change, placed.weights
        if placed.biases and bias is not None:
            change = _with_biases(change, placed, bias)
        if change is not None:
            change = replace(
                change,
                a=change.a.to(self._device),
                b=change.b.to(self._device),
                shift=None if change.shift is None else change.shift.to(self._device),
            )
            if placed.magnitudes:
                change = _with_lengths(change, placed, module, place, bias)
        moved = (replace(own, values=own.values.to(self._device)) for own in weights)
        return Effect(change=change, weights=tuple(moved))


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
        k = placed.num_columns
        zeros = torch.zeros(1, k, dtype=bias.dtype), torch.zeros(n, 1, dtype=bias.dtype)
        change = Change(a=zeros[0], b=zeros[1], starts=(0, n), scales=(0.0,))
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
