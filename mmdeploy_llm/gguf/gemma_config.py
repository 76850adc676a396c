"""Describes the text models of Gemma for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from .header import Scalar
from .metadata import MAX_HEAD_DIM, MAX_WHOLE, Metadata, has_biases, head_dim, num_layers
from .rope import proportional_rope, rope_parameters

PERIOD = 6  # every so many layers of Gemma 3, one attends to everything
# llama.cpp knows these models, whose scores are scaled by other channels, by their layers.
WIDE_HEADS = MappingProxyType({"gemma2": 46, "gemma3": 62})

Values = dict[str, Any]


def gemma(metadata: Metadata) -> Values:
    """Describes Gemma."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": has_biases(metadata, "attn_q"),
    }


def _score_scalar(metadata: Metadata) -> int:
    """Returns query_pre_attn_scalar, which no metadata hold, by llama.cpp's rule."""
    if num_layers(metadata) == WIDE_HEADS[metadata.header.architecture]:
        return max(1, metadata.whole("embedding_length") // metadata.whole("attention.head_count"))
    return head_dim(metadata)


def _layer_types(metadata: Metadata, period: int) -> list[str]:
    """Returns the kind of each layer: as stated for each, else all but every so many slide."""
    count = num_layers(metadata)
    slides: Sequence[Scalar] | None = metadata.values("attention.sliding_window_pattern")
    if slides is None:
        period = metadata.whole("attention.sliding_window_pattern", period)
        slides = [(i + 1) % period != 0 for i in range(count)]
    if len(slides) != count:
        raise metadata.wrong("attention.sliding_window_pattern", f"{count} values")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def gemma2(metadata: Metadata) -> Values:
    """Describes Gemma 2."""
    return gemma(metadata) | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _score_scalar(metadata),
        "layer_types": _layer_types(metadata, 2),
    }


def gemma3(metadata: Metadata) -> Values:
    """Describes the text model of Gemma 3."""
    values = gemma(metadata) | {"query_pre_attn_scalar": _score_scalar(metadata)}
    local = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0)}
    values["rope_parameters"] = {
        "full_attention": rope_parameters(metadata, head_dim(metadata), theta=1e6),
        "sliding_attention": local,
    }
    if metadata.has("final_logit_softcapping"):
        values["final_logit_softcapping"] = metadata.number("final_logit_softcapping")
    if metadata.has("attention.sliding_window"):
        values["sliding_window"] = metadata.whole("attention.sliding_window")
        values["layer_types"] = _layer_types(metadata, PERIOD)
    else:
        values["layer_types"] = ["full_attention"] * num_layers(metadata)
    return values


def gemma4(metadata: Metadata) -> Values:
    """Describes the text model of Gemma 4."""
    kinds = _layer_types(metadata, PERIOD)
    sizes = _by_layer(metadata, "feed_forward_length")
    heads = _by_layer(metadata, "attention.head_count_kv")
    local = kinds.index("sliding_attention") if "sliding_attention" in kinds else 0
    full = kinds.index("full_attention") if "full_attention" in kinds else local
    per_layer = metadata.whole("embedding_length_per_layer_input", 0, low=0)
    values = gemma(metadata) | {
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "layer_types": kinds,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "num_key_value_heads": heads[local],
        "head_dim": metadata.whole("attention.key_length_swa", high=MAX_HEAD_DIM),
        "global_head_dim": metadata.whole("attention.key_length", high=MAX_HEAD_DIM),
        "num_kv_shared_layers": metadata.whole("attention.shared_kv_layers", 0, low=0),
        "sliding_window": metadata.whole("attention.sliding_window"),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "hidden_size_per_layer_input": per_layer,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in metadata.tensors,
        # No metadata tell; of the published models, those without embeddings for layers.
        "use_bidirectional_attention": None if per_layer else "vision",
        "rope_parameters": {
            "full_attention": proportional_rope(metadata),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": metadata.number("rope.freq_base_swa", 10_000.0),
            },
        },
    }
    if values["attention_k_eq_v"]:
        values["num_global_key_value_heads"] = heads[full]
    if per_layer:
        rows = metadata.shape("per_layer_token_embd.weight", 2)[0]
        values["vocab_size_per_layer_input"] = rows
    if metadata.whole("expert_count", 0, low=0):
        values |= {
            "enable_moe_block": True,
            "num_experts": metadata.whole("expert_count"),
            "top_k_experts": metadata.whole("expert_used_count"),
            "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        }
    return values


def _by_layer(metadata: Metadata, key: str) -> list[int]:
    """Returns a number above 0 for each layer, of which the file may state one for all."""
    count, found = num_layers(metadata), metadata.values(key)
    if found is None:
        return [metadata.whole(key)] * count
    whole = [each for each in found if type(each) is int and 0 < each <= MAX_WHOLE]
    if len(found) != count or len(whole) != count:
        raise metadata.wrong(key, f"a number above 0 for each of {count} layers")
    return whole
