"""Computes logits by transformers' own code after the decoder: the head, and whatever a family does
to its output (a scale, a soft cap)."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from .interface import refused
from .structure import child_with


class _Found:
    """The output of a base model, with hidden states only."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        if index != 0:
            raise IndexError("this output holds hidden states only, at index 0")
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Replaces the base model and its decoder; returns the embeddings that it gets unchanged."""

    def __init__(self, base: nn.Module, decoder: nn.Module) -> None:
        super().__init__()
        # Not registered as submodules: `inner` holds their parameters already.
        self.__dict__.update(_base=base, _decoder=decoder)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _Found:
        """Wraps [1, N, hidden] as a base model's output."""
        return _Found(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.__dict__["_base"], name)
        return self if found is self.__dict__["_decoder"] else found


def head_of(model: Any, decoder: nn.Module) -> Any:
    """Returns a copy of `model` that shares all parameters and whose base model does nothing. Where
    the language model in it has a head of its own, the copy is of that.

    Raises ModelNotSupportedError for a model that is only a decoder.
    """
    base = child_with(model, decoder)
    if base is None:
        raise refused(type(model).__name__, "the model", "is its own decoder, without a head")
    child: Any = model._modules[base]
    if child is not decoder and getattr(child, "lm_head", None) is not None:
        return head_of(child, decoder)
    view = copy.copy(model)
    given = _Given(model._modules[base], decoder)
    view.__dict__["_modules"] = {**model._modules, base: given}
    return view


def logits(head: Any, hidden: Tensor) -> Tensor:
    """Computes the logits: [N, hidden] -> [N, vocab], in the same dtype; some heads widen it."""
    out: Tensor = head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
    return out.squeeze(0).to(hidden.dtype)
