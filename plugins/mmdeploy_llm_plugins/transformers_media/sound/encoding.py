"""Computes embeddings of sounds by a transformers model's own forward, which is stopped where it
hands them to its decoder: whatever a family does to sounds before that is done."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput


class _Embedded(Exception):
    """Ends a forward pass once its tokens are embedded."""

    def __init__(self, embeds: Tensor | None) -> None:
        super().__init__()
        self.embeds = embeds


def encode_sound(model: Any, decoder: nn.Module, item: MediaInput) -> Tensor:
    """Returns the embeddings of one sound, [num_tokens, hidden]. model: the whole, of which
    `decoder` is a part. Raises MediaError when its forward takes no such sounds."""
    name, weight = type(model).__name__, model.get_input_embeddings().weight
    parameters = inspect.signature(model.forward).parameters
    tensors = {
        key: tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else None)
        for key, tensor in item.tensors.items()
        if key in parameters
    }
    token = _audio_token(model.config)
    if not tensors or token is None:
        raise MediaError(f"transformers' {name} takes no sounds; use a plugin made for this model")
    # A token of text on either side: some models treat a prompt of one token in another way.
    text = _text_token(model.config)
    ids = torch.tensor([[text, *[token] * item.num_tokens, text]], device=weight.device)
    hook = decoder.register_forward_pre_hook(_stop, with_kwargs=True)
    try:
        model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **tensors)
    except _Embedded as found:
        embeds = found.embeds
    else:
        embeds = None
    finally:
        hook.remove()
    if embeds is None or embeds.shape[1] != ids.shape[1]:
        raise MediaError(
            f"transformers' {name} does not put the embeddings of a sound in place of its "
            f"{item.num_tokens} tokens; use a plugin made for this model"
        )
    return embeds[0, 1:-1]


def _audio_token(config: Any) -> int | None:
    for name in ("audio_token_id", "audio_token_index"):
        found = getattr(config, name, None)
        if found is not None:
            return int(found)
    return None


def _text_token(config: Any) -> int:
    """Returns a token id without a meaning in the config."""
    special = {
        value
        for name, value in config.to_dict().items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    return next(number for number in itertools.count() if number not in special)


def _stop(_: nn.Module, __: tuple[Any, ...], given: dict[str, Any]) -> None:
    raise _Embedded(given.get("inputs_embeds"))
