"""Passes states that a model keeps elsewhere than in the layers of transformers' cache, by the
class of the decoder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from . import states
from .states import States

# The argument of a decoder that is its cache, and the field of what it returns: since transformers
# 5.24, and before that with attention and without.
NAMES = ("cache", "past_key_values", "cache_params")


class Carrier(Protocol):
    """Passes states to a decoder and takes them back."""

    def arguments(self, cache: Any, before: States) -> Mapping[str, Any]:
        """Returns the arguments with which the decoder's forward continues from the states
        `before`, which it may modify; where they are {} the sequence begins. cache: transformers'
        cache of the step."""

    def states(self, cache: Any, out: Any) -> States:
        """Returns the states after a step. out: what the decoder's forward returned."""


class InCache:
    """Carries states in the layers of transformers' cache."""

    def arguments(self, cache: Any, before: States) -> Mapping[str, Any]:
        """See Carrier."""
        states.give(cache, before)
        return _given(cache)

    def states(self, cache: Any, out: Any) -> States:
        """See Carrier."""
        return states.take(cache)


class InMiniMaxCache:
    """Carries states in a list of MiniMax's cache."""

    def __init__(self, decoder: nn.Module) -> None:
        self._new_cache = _module_of(decoder).MiniMaxCache

    def arguments(self, cache: Any, before: States) -> Mapping[str, Any]:
        """See Carrier."""
        own = self._new_cache()
        own.layers, own.layer_class_to_replicate = cache.layers, None
        own.linear_cache = [before.get((number, "linear", 0)) for number in range(len(own.layers))]
        return _given(own)

    def states(self, cache: Any, out: Any) -> States:
        """See Carrier."""
        found = enumerate(_taken(out).linear_cache)
        return {(number, "linear", 0): state for number, state in found if state is not None}


class InModules:
    """Carries states in attributes of modules: RecurrentGemma's."""

    names = ("conv1d_state", "recurrent_states")

    def __init__(self, decoder: nn.Module) -> None:
        self._owners = [
            (number, module, name)
            for number, module in enumerate(decoder.modules())
            for name in self.names
            if hasattr(module, name)
        ]

    def arguments(self, cache: Any, before: States) -> Mapping[str, Any]:
        """See Carrier."""
        for number, module, name in self._owners:
            setattr(module, name, before.get((number, name, 0)))
        return _given(cache)

    def states(self, cache: Any, out: Any) -> States:
        """See Carrier."""
        return {(number, name, 0): getattr(owner, name) for number, owner, name in self._owners}


class InList:
    """Carries states in a list of tensors for all layers: RWKV's."""

    def arguments(self, cache: Any, before: States) -> Mapping[str, Any]:
        """See Carrier."""
        return {"state": list(before.values()) or None}

    def states(self, cache: Any, out: Any) -> States:
        """See Carrier."""
        return {(0, "state", index): state for index, state in enumerate(out.state)}


class InTuples:
    """Carries states in a tuple of tensors for each layer: xLSTM's."""

    def __init__(self, decoder: Any) -> None:
        self._config = decoder.config
        self._new_cache = _module_of(decoder).xLSTMCache

    def arguments(self, cache: Any, before: States) -> Mapping[str, Any]:
        """See Carrier."""
        if not before:
            return _given(None)  # the decoder makes one
        own = self._new_cache(self._config, 1)
        for layer, zeros in own.rnn_state.items():
            own.rnn_state[layer] = tuple(before[layer, "rnn", i] for i in range(len(zeros)))
        return _given(own)

    def states(self, cache: Any, out: Any) -> States:
        """See Carrier."""
        return {
            (layer, "rnn", index): state
            for layer, found in _taken(out).rnn_state.items()
            for index, state in enumerate(found)
        }


def carrier_of(decoder: nn.Module) -> Carrier:
    """Returns what passes the states of a decoder."""
    name = type(decoder).__name__
    if name == "MiniMaxModel":
        return InMiniMaxCache(decoder)
    if name == "RecurrentGemmaModel":
        return InModules(decoder)
    if name == "RwkvModel":
        return InList()
    return InTuples(decoder) if name == "xLSTMModel" else InCache()


def _given(cache: Any) -> dict[str, Any]:
    """Returns the cache under each of its names; a decoder is given the ones that it takes."""
    return dict.fromkeys(NAMES, cache)


def _taken(out: Any) -> Any:
    """Returns the cache of what a decoder returned."""
    return next(out[name] for name in NAMES if name in out)


def _module_of(decoder: nn.Module) -> Any:
    """Returns the module of transformers that has the decoder's class."""
    return sys.modules[type(decoder).__module__]
