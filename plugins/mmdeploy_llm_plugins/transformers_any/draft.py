"""The draft layer of checkpoints that lay theirs out as DeepSeek V3's do: one more decoder layer
after the last one, with norms of the embedding and of the hidden state, a projection of both, and a
norm before the model's own head. Copies of embedding and head are left out, as in transformers."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm_plugins.transformers_parts import buffers
from mmdeploy_llm_plugins.transformers_parts.linear import use_engine_layers

from . import structure
from .model import AnyModel
from .together import Together


class AnyDraftHead(nn.Module):
    """transformers' decoder layer, and what a checkpoint holds beside it; see hooks.Model."""

    def __init__(self, way: Together, layer: nn.Module, norm: Callable[[], Any], size: int) -> None:
        """layer: a new one. norm: returns one of hidden states, which have `size` channels."""
        super().__init__()
        self.layer = layer
        self.enorm, self.hnorm, self.norm = norm(), norm(), norm()
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        self._ways = (way,)  # in a tuple: its parameters are not the head's

    def forward(self, inputs: ForwardInputs, hidden: Tensor) -> Tensor:
        """Returns [T, hidden]; see DraftHead."""
        (way,) = self._ways
        x = torch.cat([self.enorm(way.embedded(inputs)), self.hnorm(hidden)], -1)
        out: Tensor = self.norm(way.run_layer(self.layer, self.eh_proj(x), inputs))
        return out


def add_head(model: AnyModel, config: Any) -> None:
    """Adds the draft head; see ModelSpec.draft_head. Raises ConfigError for a model whose
    sequences are computed one after the other."""
    del config
    if not isinstance(model.way, Together):
        raise ConfigError(
            f"speculative='mtp', but the draft layer of {model.parts.name} needs attention of this "
            "engine, and here transformers computes that, one sequence after the other: use "
            'speculative="ngram", or leave it out'
        )
    layers = structure.decoder_layers(model.parts.decoder)
    *_, last = layers.values()
    head = _new_head(model.way, last, len(layers))
    use_engine_layers(head)
    buffers.prepare(model.inner, head)
    assert not [*head.buffers()], "layers of DRAFTING have none that are computed"
    paths = (path for path, own in model.inner.named_modules() if own is last)
    at = f"{next(paths).rpartition('.')[0]}.{len(layers)}."
    model.add_draft_head(head, _names(head, at))


def _new_head(way: Together, last: Any, number: int) -> AnyDraftHead:
    """Returns a head whose layer is like the last one and has the next number."""
    config, new_layer = last.self_attn.config, last.__class__
    before = torch.get_default_dtype()
    torch.set_default_dtype(buffers.MARK)
    try:
        layer = new_layer(config, number - 1)  # lists in the config say what this layer is
        norm = partial(last.input_layernorm.__class__, config.hidden_size, config.rms_norm_eps)
        head = AnyDraftHead(way, layer, norm, config.hidden_size).eval()
    finally:
        torch.set_default_dtype(before)
    for module in layer.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx = number
    way.connect(layer)
    return head


def _names(head: AnyDraftHead, at: str) -> dict[str, str]:
    """Returns the name of each parameter in a checkpoint -> that in the head. at: the place of its
    layer."""
    names = [name for name, _ in head.named_parameters()]
    return {
        at + re.sub(r"^norm\.", "shared_head.norm.", name).removeprefix("layer."): name
        for name in names
    }
