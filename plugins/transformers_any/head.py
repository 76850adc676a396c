"""Logits through transformers' own code behind the decoder: the head, and whatever a family does to
its output (a scale, a soft cap)."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from .interface import refused
from .structure import child_with


class _Found:
    """A base model's output that holds hidden states and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        if index != 0:
            raise IndexError("only the hidden states are known here")
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands where the base model stood, and where its decoder stood, and gives what it gets."""

    def __init__(self, base: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        # Not registered: their parameters have their place already.
        self.__dict__.update(_base=base, _decoder=decoder)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Found:
        """[1, N, hidden] as a base model's output."""
        return _Found(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["_base"], name)
        return self if found is self.__dict__["_decoder"] else found


def head_of(model: Any, decoder: nn.Module) -> Any:
    """A view of `model` whose base model does nothing; it shares all parameters.

    Raises ModelNotSupportedError for a model that is nothing but a decoder.
    """
    view = copy.copy(model)
    base = child_with(model, decoder)
    if base is None:
        raise refused(type(model).__name__, "the model", "is its own decoder, without a head")
    given = _Given(model._modules[base], decoder)
    view.__dict__["_modules"] = {**model._modules, base: given}
    return view


def logits(head: Any, hidden: Tensor) -> Tensor:
    """[N, hidden] -> [N, vocab]."""
    out: Tensor = head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
    return out.squeeze(0)
