"""Carried: passes prompts through a few of a decoder's layers, from the hidden states that an
earlier pass has left at the first of them, so that calibrating all layers takes two passes' work:

    window 0    embeddings      -> layers 0, 1                   keeps the inputs of layer 0
    window 1    inputs of 0     -> layers 0, 1 (rounded), 2, 3   keeps the inputs of layer 2
    window 2    inputs of 2     -> layers 2, 3 (rounded), 4, 5   ...

All else of a pass stays as it is: the engine plans it, and each layer finds its keys, values and
states. The other layers return what they are given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from mmdeploy_llm.caches import SharedKV, layer_caches
from mmdeploy_llm.layers.decoder import CausalLM, Decoder

# A layer's `forward`: (x, residual, step) -> (output, residual), as DecoderLayer's.
Forward = Callable[[Tensor, Tensor | None, Any], tuple[Tensor, Tensor | None]]


class Carried:
    """The hidden states of all prompts at the entry of one layer. Every pass must have the same
    prompts in the same order. Memory: x and residual of each token, in the model's dtype.

    A model whose layers read keys and values that others have stored carries nothing: its passes
    begin at the embeddings. Of several decoders, or one that runs its layers in a loop of its own,
    all layers are computed in each pass.
    """

    def __init__(self, model: Any) -> None:
        decoders = [module.model for module in model.modules() if isinstance(module, CausalLM)]
        is_one = len(decoders) == 1 and _has_plain_loop(decoders[0])
        self._layers = list(decoders[0].layers) if is_one else []
        self._can_carry = not any(isinstance(own, SharedKV) for own in layer_caches(model))
        self._at = 0
        self._states: deque[tuple[Tensor, Tensor | None]] = deque()
        self._next: deque[tuple[Tensor, Tensor | None]] = deque()

    @contextmanager
    def window(self, first: int, stop: int) -> Iterator[None]:
        """Within it, passes compute the layers up to `stop`, and keep the inputs of layer `first`,
        where the next window's begin."""
        keeps = self._can_carry and first > self._at
        forwards = [
            self._forward(index, layer.forward, first if keeps else -1, stop)
            for index, layer in enumerate(self._layers)
        ]
        for layer, forward in zip(self._layers, forwards, strict=True):
            layer.forward = forward
        try:
            yield
        finally:
            for layer in self._layers:
                del layer.forward
        assert not self._states, "fewer tokens passed than in the pass before"
        if keeps:
            self._at, self._states, self._next = first, self._next, deque()

    def _forward(self, index: int, own: Forward, first: int, stop: int) -> Forward:
        """Returns what layer `index` does in a pass."""
        if index < self._at or index >= stop:
            return _skip
        if index == first:
            return partial(self._keep, own)
        return partial(self._resume, own) if 0 < index == self._at else own

    def _resume(
        self, own: Forward, x: Tensor, residual: Tensor | None, step: Any
    ) -> tuple[Tensor, Tensor | None]:
        del residual
        kept, rest = self._states.popleft()
        assert kept.shape == x.shape, f"{kept.shape} was kept of a pass of {x.shape}"
        return own(kept, rest, step)

    def _keep(
        self, own: Forward, x: Tensor, residual: Tensor | None, step: Any
    ) -> tuple[Tensor, Tensor | None]:
        self._next.append((x.clone(), None if residual is None else residual.clone()))
        return own(x, residual, step)


def _has_plain_loop(decoder: Any) -> bool:
    """Whether layers are called as Decoder calls them."""
    own = type(decoder)
    return own.forward is Decoder.forward and own._compute is Decoder._compute


def _skip(x: Tensor, residual: Tensor | None, step: Any) -> tuple[Tensor, Tensor | None]:
    del step
    return x, residual
