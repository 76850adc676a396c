"""Examines the structure of a transformers model: its decoder, the decoder's layers, and the
modules around it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from . import media
from .interface import refused

NOT_OURS = "has no attention that goes through transformers' attention interface"

# Arguments of a decoder that do not change the result when they are left out.
OPTIONAL = frozenset(
    {"input_ids", "inputs_embeds", "position_ids", "attention_mask"}
    | {"cache", "past_key_values"}
    | {"use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"}
    | {"encoder_hidden_states", "encoder_attention_mask", "token_type_ids", "head_mask"}
    | {"logits_to_keep", "labels", "kwargs", "output_router_logits"}
    | {*media.FIRST, *media.MAPPED, "pixel_values", "mm_encoder_outputs"}
    | {"image_embeds", "image_embeds_position_mask"}  # are among the embeddings already (Kosmos-2)
    | {"lang_ids"}  # of the config's default language (X-MOD)
)
# Arguments of a decoder, besides the embeddings, that a method of it makes of token ids alone.
BY_TOKEN = {"per_layer_inputs": "get_per_layer_inputs"}
TOKENS = ("ple_input_ids",)  # and that are the token ids themselves
# Words in the source code of models that let media tokens attend to each other.
MASK_WORDS = ("block_sequence_ids", "or_mask_function", "and_mask_function")


def decoder_of(model: Any) -> Any:
    """Returns the module that holds the layers."""
    found = model.get_decoder()
    is_head = isinstance(found, nn.Linear) or found is model.get_output_embeddings()
    if is_head:  # some call it so
        return model.base_model
    if found is model:
        return getattr(model, "model", model)
    has_head = getattr(found, "lm_head", None) is not None  # it is a whole language model
    return decoder_of(found) if has_head else found


def child_with(model: nn.Module, part: nn.Module) -> str | None:
    """Returns the name of the child of `model` that is or contains `part`, or None."""
    for name, child in model.named_children():
        if any(module is part for module in child.modules()):
            return name
    return None


def decoder_layers(decoder: nn.Module) -> dict[str, nn.Module]:
    """Returns path -> layer of the decoder's longest list of modules; {} when it has none."""
    lists = [
        (path, module)
        for path, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and "." not in path
    ]
    if not lists:
        return {}
    path, layers = max(lists, key=lambda item: len(item[1]))
    return {f"{path}.{index}": layer for index, layer in enumerate(layers)}


def describe_layers(decoder: nn.Module) -> list[str]:
    """Returns the description of the first layer, by `parts_of`; [] without layers."""
    layers = decoder_layers(decoder)
    return [parts_of(next(iter(layers.values())))] if layers else []


def parts_of(layer: nn.Module) -> str:
    """Returns the class names of a layer and of its first children, norms and MLPs left out."""
    children = [type(child).__name__ for child in layer.children()]
    kept = [name for name in children if "Norm" not in name and "MLP" not in name]
    return ", ".join([type(layer).__name__, *kept[:3]])


def check_decoder(name: str, decoder: Any) -> None:
    """Raises ModelNotSupportedError for a decoder that does not accept embeddings and positions, or
    that needs more than these from the model around it."""
    parameters = inspect.signature(decoder.forward).parameters
    what = f"its decoder ({', '.join([type(decoder).__name__, *describe_layers(decoder)])})"
    missing = [word for word in ("inputs_embeds", "position_ids") if word not in parameters]
    if missing:
        raise refused(name, what, f"takes no {' and no '.join(missing)}")
    more = [word for word in parameters if word not in OPTIONAL | makers(decoder).keys()]
    if more:
        raise refused(name, what, f"takes {', '.join(more)} besides the embeddings")


def makers(decoder: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    """Returns the arguments of BY_TOKEN and TOKENS that a decoder takes -> the method of token ids
    [1, n]."""
    parameters = inspect.signature(decoder.forward).parameters
    own = {word: torch.Tensor.long for word in TOKENS if word in parameters}
    return own | {
        word: getattr(decoder, method)
        for word, method in BY_TOKEN.items()
        if word in parameters and hasattr(decoder, method)
        if len(inspect.signature(getattr(decoder, method)).parameters) == 1
    }


def positions_of(decoder: nn.Module) -> tuple[int, int | None]:
    """Returns the position of a decoder's first token, and how many tokens have one; None: any
    number. The first is 0, but in RoBERTa and its kin, as they were trained, the one after that of
    padding."""
    for module in decoder.children():  # an encoder in it (Evolla's) counts for itself
        counts = hasattr(module, "create_position_ids_from_input_ids")
        if counts and "position_ids" in inspect.signature(module.forward).parameters:
            first = int(module.padding_idx or 0) + 1  # type: ignore[arg-type]
            table: Any = getattr(module, "position_embeddings", None)
            return first, None if table is None else int(table.num_embeddings) - first
    return 0, None


def check_masks(name: str, model: Any, decoder: nn.Module) -> None:
    """Raises ModelNotSupportedError for a model whose media tokens attend to each other: only specs
    with atomic media serve these, and each such model was checked by hand."""
    around: Any = model
    while around is not decoder:
        code = _source_around(around, decoder)
        found = next((word for word in MASK_WORDS if word in code), None)
        if found is not None and hasattr(around, "get_image_features"):
            what = f"{type(around).__name__}, around the layers,"
            raise refused(name, what, f"makes masks of its own for media ({found})")
        child = child_with(around, decoder)
        assert child is not None, "the model contains the decoder"
        around = getattr(around, child)


def _source_around(around: nn.Module, decoder: nn.Module) -> str:
    """Returns the source code of the Python module that defines `around`. Left out are the classes
    of vision towers, which may mask their own attention, and a decoder that is not told which
    tokens are of media: its masks are observed."""
    code = inspect.getsource(sys.modules[type(around).__module__])
    holders = {type(part) for part in around.modules() if decoder in part.modules()}
    towers = (
        {type(part) for part in around.modules()} - holders - {type(x) for x in decoder.modules()}
    )
    own = inspect.getsource(type(decoder))
    if "token_type_ids" not in own:
        code = code.replace(own, "")
    for kind in towers:
        if kind.__module__ == type(around).__module__:
            code = code.replace(inspect.getsource(kind), "")
    return code
