"""Computes embeddings and M-RoPE positions of media by a transformers model's own methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput, MediaSpan

IMAGE = 1  # in transformers' mm_token_type_ids


def encode(name: str, model: Any, item: MediaInput) -> Tensor:
    """Returns [num_tokens, hidden] of one item by get_image_features, whose arguments are the
    item's tensors of the same names."""
    method = getattr(model, "get_image_features", None)
    if method is None:
        raise MediaError(
            f"transformers' {name} has no get_image_features; use a plugin made for this model"
        )
    weight = model.get_input_embeddings().weight
    inputs = {
        key: _to_device(tensor, weight)
        for key, tensor in item.tensors.items()
        if _accepts(method, key)
    }
    found = method(**inputs, return_dict=True)
    found = getattr(found, "pooler_output", found)
    features = [found] if isinstance(found, Tensor) else list(found)
    return torch.cat([feature.reshape(-1, weight.shape[1]) for feature in features])


def positions(base: Any, num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor:
    """Returns the positions [3, num_tokens] that the model's get_rope_index computes."""
    if not spans:
        return torch.arange(num_tokens).expand(3, -1)
    kinds = torch.zeros(1, num_tokens, dtype=torch.int64)
    for span in spans:
        for start, end in span.runs:
            kinds[0, start:end] = IMAGE
    needed = ("mm_token_type_ids", "image_grid_thw")
    if not all(_accepts(base.get_rope_index, name) for name in needed):
        raise MediaError(
            f"get_rope_index of {type(base).__name__} needs token ids, which are not known here; "
            "use a plugin made for this model"
        )
    grids = torch.tensor([span.item.grid_thw for span in spans])
    ids = torch.zeros_like(kinds)
    found, _ = base.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    result: Tensor = found[:, 0]
    return result


def _to_device(tensor: Tensor, like: Tensor) -> Tensor:
    """Copies a tensor to the device of `like`; floating-point values also get its dtype."""
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)


def _accepts(method: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(method).parameters
