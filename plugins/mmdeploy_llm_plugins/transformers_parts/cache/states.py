"""Keeps the states that transformers' cache has besides keys and values in the rows of the engine's
state tensors.

    row read --> layers of the cache --> pass of the decoder --> layers of the cache --> row written
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from mmdeploy_llm.caches import State
from mmdeploy_llm.forward import StateContext

CONV, RECURRENT = "conv_states", "recurrent_states"  # attributes of transformers' layers

Key = tuple[int, str, int]  # layer of the model, attribute, index in it
States = dict[Key, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """The engine's rows of a layer, which it reads and writes itself. tensors: its convolution's
    and its recurrence's, [rows, *shape]. read, write: see forward.StateContext."""

    tensors: tuple[Tensor, ...]
    read: Tensor
    write: Tensor


class StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """Holds the states of one layer, for one sequence in one step. lent: in place of these."""

    lent: Lent | None = None

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Allocates a state. Transformers' method also imports torch's compiler, which takes
        seconds."""
        if conv_states is not None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self._set(CONV, state_idx, conv_states.new_zeros(*conv_states.shape[:-1], size))
        if recurrent_states is not None:
            self._set(RECURRENT, state_idx, torch.zeros_like(recurrent_states))

    def resume(self, name: str, index: int, state: Tensor) -> None:
        """Continues from a state, which the layer may modify."""
        self._set(name, index, state)
        self.has_previous_state[index] = True

    def _set(self, name: str, index: int, state: Tensor) -> None:
        if name == CONV:
            self.conv_kernel_size[index] = state.shape[-1]
        getattr(self, name)[index] = state
        getattr(self, f"is_{name}_initialized")[index] = True
        self.dtype, self.device = state.dtype, state.device


class Store(Protocol):
    """Holds the states of a pass between steps, of one sequence or several."""

    def load(self) -> States:
        """Returns copies of the states after the last step."""

    def save(self, states: States) -> None:
        """Keeps the states after this step."""


@dataclass(slots=True)
class Slots:
    """Records which states a sequence has, as a trial finds them. `see` is the only writer.

    index: key -> (shape, dtype).
    """

    index: dict[Key, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

    def see(self, states: Mapping[Key, Tensor]) -> None:
        """Records states. Raises ValueError when they differ from those of an earlier step."""
        found = {key: (state.shape, state.dtype) for key, state in states.items()}
        if self.index and self.index != found:
            raise ValueError("the sizes of the states change from step to step")
        self.index = found

    @property
    def cache(self) -> State:
        """All states as those of one layer of the engine's cache."""
        return State(
            shapes=tuple(tuple(shape) for shape, _ in self.index.values()),
            dtypes=tuple(str(dtype).removeprefix("torch.") for _, dtype in self.index.values()),
            is_replicated=True,
        )


class Remembered:
    """Holds the states of a trial's sequence in memory; see Store."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._states: States = {}

    def load(self) -> States:
        """See Store."""
        return {key: state.clone() for key, state in self._states.items()}

    def save(self, states: States) -> None:
        """See Store."""
        self._slots.see(states)
        self._states = states


class Rows:
    """Holds the states of sequences of a step in two rows each of the engine's tensors; see
    Store."""

    def __init__(
        self,
        slots: Slots,
        context: StateContext,
        layer: int,
        sequences: Sequence[int],
        lent: Collection[int] = (),
    ) -> None:
        """layer: that of `Slots.cache` in the engine's cache. lent: layers of the model for
        `lend`."""
        columns = dict(zip(slots.index, context.tensors(layer), strict=True))
        self._columns = {key: own for key, own in columns.items() if key[0] not in lent}
        self._lent = {
            number: tuple(columns[number, name, 0].flatten(0, 1) for name in (CONV, RECURRENT))
            for number in lent
        }
        own = list(sequences)
        self._read, self._write = context.read[own], context.write[own]

    def lend(self, cache: Any) -> None:
        """Gives layers of transformers' cache that can work on the engine's rows these rows, which
        `load` and `save` leave out."""
        for number, tensors in self._lent.items():
            own = Lent(tensors=tensors, read=self._read, write=self._write)
            cache.layers[number].lent = own

    def load(self) -> States:
        """See Store."""
        return {
            key: column.index_select(0, self._read).flatten(0, 1)
            for key, column in self._columns.items()
        }

    def save(self, states: States) -> None:
        """See Store. A step must write every state, or a later one would continue from older
        ones."""
        assert states.keys() == self._columns.keys(), "the same states as in the trial"
        for key, column in self._columns.items():
            column.index_copy_(0, self._write, states[key].reshape(-1, *column.shape[1:]))
        self._read = self._write


class SideBySideStores:
    """Holds the states of several stores as those of one pass; see Store."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self._stores = stores

    def load(self) -> States:
        """See Store."""
        found = [store.load() for store in self._stores]
        return {key: torch.cat([own[key] for own in found]) for key in found[0]}

    def save(self, states: States) -> None:
        """See Store."""
        parts = {key: state.chunk(len(self._stores)) for key, state in states.items()}
        for index, store in enumerate(self._stores):
            store.save({key: own[index] for key, own in parts.items()})


def give(cache: Any, states: Mapping[Key, Tensor]) -> None:
    """Makes transformers' cache continue from states."""
    for (layer, name, index), state in states.items():
        cache.layers[layer].resume(name, index, state)


def take(cache: Any) -> States:
    """Returns the states that transformers' cache holds after a step."""
    return {
        (number, name, index): state
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, StateLayer)
        for name in (CONV, RECURRENT)
        for index, state in getattr(layer, name).items()
        if state is not None
    }
