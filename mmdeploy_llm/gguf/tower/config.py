"""Describes an image-text model for transformers, from the metadata of its two GGUF files.

What the files leave out is what every published model of the family has; tests compare it with the
configs of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.gguf.config import Values, gguf_config
from mmdeploy_llm.gguf.header import Header
from mmdeploy_llm.gguf.metadata import MAX_LAYERS, Metadata

from .names import Tower, model_of, tower_of

TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Qwen2.5-VL: pixels along a side of a window of attention, time steps of a second.
WINDOW_PIXELS, TOKENS_PER_SECOND = 112, 2
QWEN2_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384}  # of published models
MAX_SIDE = 2**16  # pixels or patches
MAX_MERGE = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """values: transformers' config of the whole model, "model_type" and "architectures" included.
    image, video: options of the processors."""

    values: Values
    image: Values
    video: Values


def media_config(text: Header, tower: Header) -> MediaConfig:
    """Describes the model whose text model and vision tower are in these files.

    Raises ModelNotSupportedError for an unknown architecture, CheckpointError for an unknown tower,
    files that do not belong together and metadata that are missing or out of range.
    """
    kind, model, metadata = tower_of(tower), model_of(text, tower), Metadata(tower)
    own = gguf_config(text)
    shared = {name: own[name] for name in ("tie_word_embeddings", "dtype", *TOKEN_KEYS)}
    del own["architectures"]
    if model.text_type:
        own["model_type"] = model.text_type
    _check_width(metadata, kind, own["hidden_size"], text)
    patch = _square(metadata, "vision.patch_size")
    vision, image = OF_TOWER[model.model_type](metadata, own)
    channels = {name: _channels(metadata, name) for name in ("image_mean", "image_std")}
    tokens = {field: _token(text, word) for field, word in kind.tokens.items()}
    outer = {name: vision.pop(name) for name in OUTER & vision.keys()}
    return MediaConfig(
        values={
            "model_type": model.model_type,
            "architectures": [model.model],
            "text_config": own,
            "vision_config": {"patch_size": patch, **vision},
            **shared,
            **tokens,
            **outer,
        },
        image={**channels, **image},
        video=channels,
    )


def _check_width(metadata: Metadata, kind: Tower, hidden_size: int, text: Header) -> None:
    found = metadata.tensors.get(kind.last)
    if found is None or found.shape[0] != hidden_size:
        width = "missing" if found is None else f"of the shape {list(found.shape)}"
        raise CheckpointError(
            f"the tensor {kind.last} of {metadata.header.paths[0]} is {width}, but the model in "
            f"{text.paths[0].name} has {hidden_size} channels: they do not belong together. Put "
            "each model and its mmproj file into a folder of their own"
        )


def _token(text: Header, word: str) -> int:
    found = text.values.get("tokenizer.ggml.tokens")
    if not isinstance(found, tuple) or word not in found:
        raise CheckpointError(
            f"tokenizer.ggml.tokens of {text.paths[0]} has no {word}, which stands for images or "
            "videos in a prompt; put the model's config.json into the folder, which names another"
        )
    return found.index(word)


def _channels(metadata: Metadata, name: str) -> list[float]:
    """Returns the values of three channels."""
    found = metadata.values(f"vision.{name}")
    allowed = "three numbers" + (" above 0" if name == "image_std" else "")
    values = [] if found is None else [each for each in found if type(each) in (int, float)]
    is_good = len(values) == 3 and all(abs(float(each)) < 1e4 for each in values)
    if not is_good or (name == "image_std" and min(map(float, values)) <= 0):
        raise metadata.wrong(f"vision.{name}", allowed)
    return [float(str(np.float32(each))) for each in values]  # as few digits as tell it apart


def _square(metadata: Metadata, key: str) -> int:
    return metadata.whole(key, high=MAX_SIDE)


def _sizes(metadata: Metadata) -> tuple[int, int, int]:
    """Returns channels, layers and heads of a tower."""
    size = metadata.whole("vision.embedding_length")
    num_heads = metadata.whole("vision.attention.head_count", high=MAX_SIDE)
    if size % num_heads:
        raise metadata.wrong("vision.attention.head_count", f"a divisor of {size} channels")
    return size, metadata.whole("vision.block_count", high=MAX_LAYERS), num_heads


def _merge(metadata: Metadata, default: int = 2) -> int:
    return metadata.whole("vision.spatial_merge_size", default, high=MAX_MERGE)


def _grid_image(metadata: Metadata) -> Values:
    """Returns the options of processors whose patches hold two frames."""
    return {
        "patch_size": _square(metadata, "vision.patch_size"),
        "merge_size": _merge(metadata),
        "temporal_patch_size": 2,
    }


def _pixels(metadata: Metadata, default: Mapping[str, int]) -> Values:
    keys = {"min_pixels": "vision.image_min_pixels", "max_pixels": "vision.image_max_pixels"}
    return {name: metadata.whole(key, default[name]) for name, key in keys.items()}


def _mlp_size(metadata: Metadata, size: int) -> int:
    """Returns the channels within an MLP. Raises CheckpointError for a file whose names of its two
    matrices are swapped, as converters before 2025 wrote them."""
    inner, outer = metadata.shape("v.blk.0.ffn_up.weight", 2)
    if outer != size:
        raise CheckpointError(
            f"v.blk.0.ffn_up.weight of {metadata.header.paths[0]} reads {outer} channels, not "
            f"{size}: an old converter wrote the file; convert the model again with a current "
            "llama.cpp"
        )
    return inner


def _mlp_ratio(metadata: Metadata, size: int) -> int:
    ratio, rest = divmod(_mlp_size(metadata, size), size)
    if rest or not ratio:
        raise CheckpointError(
            f"v.blk.0.ffn_up.weight of {metadata.header.paths[0]} has {ratio * size + rest} rows, "
            f"which are no multiple of {size}; download the file again"
        )
    return ratio


def _qwen2(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    size, depth, num_heads = _sizes(metadata)
    vision = {
        "depth": depth,
        "embed_dim": size,
        "num_heads": num_heads,
        # The converter writes another number as feed_forward_length.
        "mlp_ratio": _mlp_ratio(metadata, size),
        "hidden_size": text["hidden_size"],
        "hidden_act": _activation(metadata, "quick_gelu"),
        "spatial_merge_size": _merge(metadata),
    }
    return vision, {**_grid_image(metadata), **_pixels(metadata, QWEN2_PIXELS)}


def _qwen25(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    size, depth, num_heads = _sizes(metadata)
    period = metadata.whole("vision.n_wa_pattern", high=MAX_LAYERS)
    vision = {
        "depth": depth,
        "hidden_size": size,
        "num_heads": num_heads,
        "intermediate_size": _mlp_size(metadata, size),
        "out_hidden_size": text["hidden_size"],
        "hidden_act": _activation(metadata, "silu"),
        "spatial_merge_size": _merge(metadata),
        "fullatt_block_indexes": list(range(period - 1, depth, period)),
        "window_size": metadata.whole("vision.window_size", WINDOW_PIXELS, high=MAX_SIDE),
        "tokens_per_second": TOKENS_PER_SECOND,
    }
    return vision, {**_grid_image(metadata), **_pixels(metadata, QWEN2_PIXELS)}


def _qwen3(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    size, depth, num_heads = _sizes(metadata)
    tapped = metadata.values("vision.is_deepstack_layers") or ()
    vision = {
        "depth": depth,
        "hidden_size": size,
        "num_heads": num_heads,
        "intermediate_size": metadata.whole("vision.feed_forward_length"),
        "out_hidden_size": text["hidden_size"],
        "hidden_act": "gelu_pytorch_tanh",
        "spatial_merge_size": _merge(metadata),
        "num_position_embeddings": metadata.shape("v.position_embd.weight", 2)[0],
        "deepstack_visual_indexes": [i for i, tap in enumerate(tapped[:depth]) if tap],
    }
    return vision, _grid_image(metadata)


def _glm4v(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    size, depth, num_heads = _sizes(metadata)
    vision = {
        "depth": depth,
        "hidden_size": size,
        "num_heads": num_heads,
        "image_size": _square(metadata, "vision.image_size"),
        "intermediate_size": metadata.whole("vision.feed_forward_length"),
        "out_hidden_size": text["hidden_size"],
        "hidden_act": _activation(metadata, "silu"),
        "rms_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        "spatial_merge_size": _merge(metadata),
        "attention_bias": "v.blk.0.attn_qkv.bias" in metadata.tensors,
    }
    return vision, _grid_image(metadata)


def _gemma4(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    del text
    size, depth, num_heads = _sizes(metadata)
    merge = metadata.whole("vision.projector.scale_factor", 3, high=MAX_MERGE)
    vision = {
        "hidden_size": size,
        "num_hidden_layers": depth,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "head_dim": metadata.shape("v.blk.0.attn_q_norm.weight", 1)[0],
        "intermediate_size": metadata.whole("vision.feed_forward_length"),
        "rms_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        "pooling_kernel_size": merge,
        "position_embedding_size": metadata.shape("v.position_embd.weight", 3)[1],
        "standardize": "v.std_bias" in metadata.tensors,
        "use_clipped_linears": "v.blk.0.attn_q.input_max" in metadata.tensors,
    }
    return vision, {
        "patch_size": _square(metadata, "vision.patch_size"),
        "pooling_kernel_size": merge,
    }


def _lfm2(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    del text
    size, depth, num_heads = _sizes(metadata)
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": size,
        "num_hidden_layers": depth,
        "num_attention_heads": num_heads,
        "intermediate_size": metadata.whole("vision.feed_forward_length"),
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        "num_patches": metadata.shape("v.position_embd.weight", 2)[0],
        "vision_use_head": False,
        "downsample_factor": metadata.whole("vision.projector.scale_factor", 2, high=MAX_MERGE),
        "projector_hidden_size": metadata.shape("mm.1.weight", 2)[0],
        "projector_bias": "mm.1.bias" in metadata.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in metadata.tensors,
    }
    return vision, {"encoder_patch_size": _square(metadata, "vision.patch_size")}


def _internvl(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    del text
    size, depth, num_heads = _sizes(metadata)
    side = _square(metadata, "vision.image_size")
    merge = metadata.whole("vision.projector.scale_factor", 2, high=MAX_MERGE)
    num_patches = side // _square(metadata, "vision.patch_size")
    vision = {
        "hidden_size": size,
        "num_hidden_layers": depth,
        "num_attention_heads": num_heads,
        "intermediate_size": metadata.whole("vision.feed_forward_length"),
        "image_size": [side, side],
        "patch_size": [_square(metadata, "vision.patch_size")] * 2,
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        "hidden_act": _activation(metadata, "gelu"),
        "attention_bias": "v.blk.0.attn_q.bias" in metadata.tensors,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in metadata.tensors,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in metadata.tensors else "rms_norm",
        "use_mean_pooling": True,  # there is no norm after the last layer
        "downsample_ratio": 1 / merge,
        "image_seq_length": max(1, num_patches // merge) ** 2,
    }
    image: Values = {"size": {"height": side, "width": side}}
    names = {"min_patches": "vision.preproc_min_tiles", "max_patches": "vision.preproc_max_tiles"}
    image |= {name: metadata.whole(key) for name, key in names.items() if metadata.has(key)}
    return vision, image


def _activation(metadata: Metadata, wanted: str) -> str:
    """Returns the activation that the file states. Raises CheckpointError for another one than the
    family has."""
    names = {"use_gelu": "gelu", "use_silu": "silu"}
    stated = [
        name for key, name in names.items() if metadata.header.values.get(f"clip.{key}") is True
    ]
    found = stated[0] if len(stated) == 1 else "quick_gelu"
    if found != wanted or len(stated) > 1:
        raise CheckpointError(
            f"the vision tower in {metadata.header.paths[0]} has the activation "
            f"{' and '.join(stated) or found}; models of its kind have {wanted}. Convert the model "
            "again with a current llama.cpp"
        )
    return found


# Fields that transformers has beside the vision config.
OUTER = frozenset(
    {
        "downsample_factor",
        "downsample_ratio",
        "image_seq_length",
        "projector_bias",
        "projector_hidden_size",
        "projector_use_layernorm",
    }
)
OF_TOWER: Mapping[str, Callable[[Metadata, Values], tuple[Values, Values]]] = MappingProxyType(
    {
        "qwen2_vl": _qwen2,
        "qwen2_5_vl": _qwen25,
        "qwen3_vl": _qwen3,
        "qwen3_vl_moe": _qwen3,
        "qwen3_5": _qwen3,
        "qwen3_5_moe": _qwen3,
        "glm4v": _glm4v,
        "gemma4": _gemma4,
        "lfm2_vl": _lfm2,
        "internvl": _internvl,
    }
)
