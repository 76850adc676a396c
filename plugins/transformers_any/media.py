"""Computes embeddings and M-RoPE positions of media by a transformers model's own methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan

IMAGE = 1  # in transformers' mm_token_type_ids
# Arguments of a decoder whose first layers add features of media (DeepStack).
MASK, FEATURES = "visual_pos_masks", "deepstack_visual_embeds"


def encode(name: str, model: Any, base: Any, item: MediaInput) -> Tensor:
    """Returns [num_tokens, hidden] of one item by get_image_features of the base, else of the
    model, whose arguments are the item's tensors of the same names. Features for the first layers
    are further columns."""
    methods = (getattr(owner, "get_image_features", None) for owner in (base, model))
    method = next(filter(None, methods), None)
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
    late = getattr(found, "deepstack_features", None) or ()
    columns = [getattr(found, "pooler_output", found), *late]
    return torch.cat([_rows(column, weight.shape[1]) for column in columns], 1)


def _rows(found: Any, size: int) -> Tensor:
    """Returns [num_tokens, size] of a tensor, or of one per image or tile."""
    features = [found] if isinstance(found, Tensor) else list(found)
    return torch.cat([feature.reshape(-1, size) for feature in features])


def num_features(config: Any) -> int:
    """Returns how many of the decoder's first layers add features of media."""
    for part in (config, getattr(config, "vision_config", None)):
        layers = getattr(part, "deepstack_visual_indexes", None)
        if layers is not None:
            return len(layers)
    return 0


def features(inputs: ForwardInputs, size: int, start: int, end: int) -> dict[str, Any]:
    """Returns the decoder's arguments for features of media, of the rows start .. end."""
    rows, found = inputs.media_rows, inputs.media_features(size)
    if rows is None or not found:
        return {}
    own = (rows >= start) & (rows < end)
    mask = torch.zeros(1, end - start, dtype=torch.bool, device=rows.device)
    mask[0, rows[own] - start] = True
    return {MASK: mask, FEATURES: [feature[own] for feature in found]}


def positions(base: Any, num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor:
    """Returns the positions [3, num_tokens] that the model's get_rope_index computes."""
    if not spans:
        return torch.arange(num_tokens).expand(3, -1)
    kinds = torch.zeros(1, num_tokens, dtype=torch.int64)
    for span in spans:
        for start, end in span.runs:
            kinds[0, start:end] = IMAGE
    grids = torch.tensor([span.item.grid_thw for span in spans])
    if not _accepts(base.get_rope_index, "mm_token_type_ids"):
        raise MediaError(
            f"get_rope_index of {type(base).__name__} needs token ids, which are not known here; "
            "use a plugin made for this model"
        )
    ids = torch.zeros_like(kinds)
    found, _ = base.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grids)
    result: Tensor = found[:, 0]
    return result


def _to_device(tensor: Tensor, like: Tensor) -> Tensor:
    """Copies a tensor to the device of `like`; floating-point values also get its dtype."""
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)


def _accepts(method: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(method).parameters
