"""Computes embeddings and M-RoPE positions of media by a transformers model's own methods."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.forward import ForwardInputs
from mmdeploy_llm.hooks import MediaInput, MediaSpan

TYPES = {"image": 1, "video": 2}  # in transformers' mm_token_type_ids
CROPS = {"image": "target_sizes", "video": "target_sizes_videos"}  # patches of each crop
VIDEO_PIXELS = "pixel_values_videos"
# Seconds between two steps of a video's grid: the names of the tensor and of the argument.
SECONDS = {"second_per_grid_ts": "second_per_grid_ts", "video_second_per_grid": "second_per_grids"}
# Arguments of a decoder that adds features of media in some layers (DeepStack): in the first ones,
# or in those of a map.
FIRST = ("visual_pos_masks", "deepstack_visual_embeds")
MAPPED = ("vision_mask", "deepstack_features")


def encode(name: str, model: Any, base: Any, item: MediaInput) -> Tensor:
    """Returns the embeddings of one item, [num_tokens, hidden]: what get_image_features of the
    base, else of the model, makes of the item's tensors, or get_video_features of the pixels of a
    video. Features for single layers follow as further columns."""
    own = "get_video_features" if VIDEO_PIXELS in item.tensors else "get_image_features"
    names = (own, "get_video_features") if item.kind == "video" else (own,)
    methods = (getattr(owner, name, None) for name in names for owner in (base, model))
    method = next(filter(None, methods), None)
    if method is None:
        raise MediaError(f"transformers' {name} has no {own}; use a plugin made for this model")
    weight = model.get_input_embeddings().weight
    inputs = {
        key: _given(method, key, _to_device(tensor, weight))
        for key, tensor in item.tensors.items()
        if _accepts(method, key)
    }
    found = method(**inputs, return_dict=True)
    late = getattr(found, "deepstack_features", None) or ()
    columns = [column[1] if _is_pair(column) else column for column in late]
    main = getattr(found, "pooler_output", None if late else found)
    projector = getattr(model, "multi_modal_projector", None)
    if main is None and not late and projector is not None:  # Llama 4 projects in its forward
        main = projector(found.last_hidden_state.flatten(0, -2))
    try:
        rows = [_rows(column, weight.shape[1]) for column in columns]
        embeds = (
            torch.zeros_like(rows[0]) if main is None and rows else _rows(main, weight.shape[1])
        )
    except (TypeError, ValueError) as error:
        raise MediaError(
            f"{own} of transformers' {name} does not return the embeddings of the {item.kind}'s "
            f"tokens ({error}); use a plugin made for this model"
        ) from error
    return torch.cat([embeds, *rows], 1)


def _is_pair(found: Any) -> bool:
    """Whether features come with the number of their layer."""
    return isinstance(found, tuple) and isinstance(found[0], int)


def _rows(found: Any, size: int) -> Tensor:
    """Joins a tensor, or one for each image or tile, to [num_tokens, size]. Raises TypeError for
    anything else, ValueError for another size."""
    features = [found] if isinstance(found, Tensor) else list(found)
    for feature in features:
        if not isinstance(feature, Tensor):
            raise TypeError(f"it returned {type(found).__name__}")
        if feature.shape[-1] != size:
            raise ValueError(f"they have {feature.shape[-1]} channels, must be {size}")
    return torch.cat([feature.reshape(-1, size) for feature in features])


def indicate(base: Any, inputs: ForwardInputs, embeds: Tensor) -> Tensor:
    """Replaces the embeddings of the tokens around images by those that the vision tower has for
    them (Ovis2): the last ones of its own vocabulary. transformers does so in prompts with images
    only, and processors write these tokens nowhere else."""
    ids = torch.tensor(base.visual_indicator_token_ids, device=embeds.device)
    table = base.visual_embeddings_table.weight[-len(ids) :]
    is_indicator = (inputs.token_ids[:, None] == ids) & inputs.in_prompt[:, None]
    rows, which = is_indicator.nonzero(as_tuple=True)
    return embeds.index_copy(0, rows, table[which])


def feature_layers(config: Any) -> tuple[int, ...]:
    """Returns the layers of the decoder that add features of media, one for each feature."""
    mapped = getattr(config, "deepstack_layer_map", None)
    if mapped is not None:
        return (*(layer for _, layer in mapped), *config.spatial_target_layers)
    for part in (config, getattr(config, "vision_config", None)):
        tapped = getattr(part, "deepstack_visual_indexes", None)
        if tapped is not None:
            return tuple(range(len(tapped)))
    return ()


def features(config: Any, inputs: ForwardInputs, size: int, start: int, end: int) -> dict[str, Any]:
    """Returns the arguments in which the decoder takes features of media, for the rows start ..
    end."""
    rows, found = inputs.media_rows, inputs.media_features(size)
    if rows is None or not found:
        return {}
    is_own = (rows >= start) & (rows < end)
    mask = torch.zeros(1, end - start, dtype=torch.bool, device=rows.device)
    mask[0, rows[is_own] - start] = True
    own = [feature[is_own] for feature in found]
    if hasattr(config, "deepstack_layer_map"):
        by_layer = dict(zip(feature_layers(config), own, strict=True))
        return dict(zip(MAPPED, (mask.unsqueeze(-1), by_layer), strict=True))
    return dict(zip(FIRST, (mask, own), strict=True))


def positions(base: Any, num_tokens: int, spans: Sequence[MediaSpan]) -> Tensor:
    """Returns the positions [axes, num_tokens] that the model's get_rope_index computes."""
    kinds = torch.zeros(1, num_tokens, dtype=torch.int64)
    if any(span.item.kind not in TYPES for span in spans):
        raise MediaError(
            f"get_rope_index of {type(base).__name__} is not known here for a sound beside images; "
            "use a plugin made for this model"
        )
    for span in spans:
        for start, end in span.runs:
            kinds[0, start:end] = TYPES[span.item.kind]
    if any(span.item.grid_thw is None for span in spans):
        raise MediaError(
            f"get_rope_index of {type(base).__name__} needs what the image processor does not give "
            "(a grid of patches); use a plugin made for this model"
        )
    index, ids = base.get_rope_index, torch.zeros_like(kinds)
    given = {name: value for name, value in _grids(spans).items() if _accepts(index, name)}
    if _accepts(index, "mm_token_type_ids") and _accepts(index, "image_grid_thw"):
        found, _ = index(ids, mm_token_type_ids=kinds, **given)
    elif hasattr(base.config, "vision_start_token_id") and _accepts(index, "image_grid_thw"):
        _write_ids(ids, kinds, base.config)
        found, _ = index(ids, **given, attention_mask=torch.ones_like(ids))
    else:
        raise MediaError(
            f"get_rope_index of {type(base).__name__} needs token ids, which are not known here; "
            "use a plugin made for this model"
        )
    result: Tensor = found[:, 0]
    return result


def counts_from_tokens(base: Any) -> bool:
    """Whether get_rope_index needs the sizes of crops, and the marks between them in the prompt."""
    return _accepts(base.get_rope_index, CROPS["image"])


def positions_of(base: Any, token_ids: Sequence[int], spans: Sequence[MediaSpan]) -> Tensor:
    """Returns the positions [axes, tokens] that such a get_rope_index computes."""
    kinds = torch.zeros(1, len(token_ids), dtype=torch.int64)
    given: dict[str, Any] = {}
    for kind, name in CROPS.items():
        own = [span for span in spans if span.item.kind == kind]
        for start, end in (run for span in own for run in span.runs):
            kinds[0, start:end] = TYPES[kind]
        if any(name not in span.item.tensors for span in own):
            raise MediaError(
                f"get_rope_index of {type(base).__name__} needs the sizes of an item's crops "
                f"({name}), which come with its pixels only; give the {kind} itself"
            )
        if own:
            given[name] = torch.cat([span.item.tensors[name] for span in own])
    ids = torch.tensor([list(token_ids)])
    found, _ = base.get_rope_index(ids, mm_token_type_ids=kinds, **given)
    result: Tensor = found[:, 0]
    return result


def _grids(spans: Sequence[MediaSpan]) -> dict[str, Any]:
    """Returns the arguments of get_rope_index that describe images and videos."""
    found: dict[str, Any] = {}
    for kind in TYPES:
        grids = [span.item.grid_thw for span in spans if span.item.kind == kind]
        if grids:
            found[f"{kind}_grid_thw"] = torch.tensor(grids)
    for tensor, name in SECONDS.items():
        items = [span.item.tensors for span in spans if tensor in span.item.tensors]
        if items:
            found[name] = torch.cat([tensors[tensor].view(-1) for tensors in items])
    return found


def _write_ids(ids: Tensor, kinds: Tensor, config: Any) -> None:
    """Fills `ids` so that such a model finds its images in them: placeholders and the start token
    before them get their own ids, all other tokens one without meaning."""
    special = {
        value
        for name, value in config.to_dict().items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    ids.fill_(next(number for number in itertools.count() if number not in special))
    for kind, number in TYPES.items():
        ids[kinds == number] = getattr(config, f"{kind}_token_id", 0)
    is_first = (kinds > 0) & (kinds.roll(1, -1) != kinds)
    ids[is_first.roll(-1, -1)] = config.vision_start_token_id


def _to_device(tensor: Tensor, like: Tensor) -> Tensor:
    """Copies a tensor to the device of `like`; floating-point values also get its dtype."""
    return tensor.to(like.device, like.dtype if tensor.is_floating_point() else None)


def _given(method: Callable[..., Any], name: str, value: Tensor) -> Any:
    """Returns a value as the method takes it: counts of each image as a list, where it says so."""
    kind = inspect.signature(method).parameters[name].annotation
    return value.tolist() if str(kind).startswith("list[") else value


def _accepts(method: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(method).parameters
