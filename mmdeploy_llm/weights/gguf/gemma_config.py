"""Describes the text models of Gemma for transformers."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from .facts import MAX_HEAD_DIM, MAX_WHOLE, Facts, has_biases, head_dim, num_layers
from .header import Scalar
from .rope import proportional_rope, rope_parameters

PERIOD = 6  # every so many layers of Gemma 3, one attends to everything
# llama.cpp knows these models, whose scores are scaled by other channels, by their layers.
WIDE_HEADS = MappingProxyType({"gemma2": 46, "gemma3": 62})

Values = dict[str, Any]


def gemma(facts: Facts) -> Values:
    """Describes Gemma."""
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": has_biases(facts, "attn_q"),
    }


def _score_scalar(facts: Facts) -> int:
    """Returns query_pre_attn_scalar, which no metadata hold, by llama.cpp's rule."""
    if num_layers(facts) == WIDE_HEADS[facts.header.architecture]:
        return max(1, facts.whole("embedding_length") // facts.whole("attention.head_count"))
    return head_dim(facts)


def _layer_types(facts: Facts, period: int) -> list[str]:
    """Returns the kind of each layer: as stated for each, else all but every so many slide."""
    count = num_layers(facts)
    slides: Sequence[Scalar] | None = facts.values("attention.sliding_window_pattern")
    if slides is None:
        period = facts.whole("attention.sliding_window_pattern", period)
        slides = [(i + 1) % period != 0 for i in range(count)]
    if len(slides) != count:
        raise facts.wrong("attention.sliding_window_pattern", f"{count} values")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def gemma2(facts: Facts) -> Values:
    """Describes Gemma 2."""
    return gemma(facts) | {
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "sliding_window": facts.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _score_scalar(facts),
        "layer_types": _layer_types(facts, 2),
    }


def gemma3(facts: Facts) -> Values:
    """Describes the text model of Gemma 3."""
    values = gemma(facts) | {"query_pre_attn_scalar": _score_scalar(facts)}
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)}
    values["rope_parameters"] = {
        "full_attention": rope_parameters(facts, head_dim(facts), theta=1e6),
        "sliding_attention": local,
    }
    if facts.has("final_logit_softcapping"):
        values["final_logit_softcapping"] = facts.number("final_logit_softcapping")
    if facts.has("attention.sliding_window"):
        values["sliding_window"] = facts.whole("attention.sliding_window")
        values["layer_types"] = _layer_types(facts, PERIOD)
    else:
        values["layer_types"] = ["full_attention"] * num_layers(facts)
    return values


def gemma4(facts: Facts) -> Values:
    """Describes the text model of Gemma 4."""
    kinds = _layer_types(facts, PERIOD)
    sizes = _by_layer(facts, "feed_forward_length")
    heads = _by_layer(facts, "attention.head_count_kv")
    local = kinds.index("sliding_attention") if "sliding_attention" in kinds else 0
    full = kinds.index("full_attention") if "full_attention" in kinds else local
    per_layer = facts.whole("embedding_length_per_layer_input", 0, low=0)
    values = gemma(facts) | {
        "rms_norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "layer_types": kinds,
        "intermediate_size": sizes[0],
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "num_key_value_heads": heads[local],
        "head_dim": facts.whole("attention.key_length_swa", high=MAX_HEAD_DIM),
        "global_head_dim": facts.whole("attention.key_length", high=MAX_HEAD_DIM),
        "num_kv_shared_layers": facts.whole("attention.shared_kv_layers", 0, low=0),
        "sliding_window": facts.whole("attention.sliding_window"),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "hidden_size_per_layer_input": per_layer,
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in facts.tensors,
        # No metadata tell; of the published models, those without embeddings for layers.
        "use_bidirectional_attention": None if per_layer else "vision",
        "rope_parameters": {
            "full_attention": proportional_rope(facts),
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": facts.number("rope.freq_base_swa", 10_000.0),
            },
        },
    }
    if values["attention_k_eq_v"]:
        values["num_global_key_value_heads"] = heads[full]
    if per_layer:
        rows = facts.shape("per_layer_token_embd.weight", 2)[0]
        values["vocab_size_per_layer_input"] = rows
    if facts.whole("expert_count", 0, low=0):
        values |= {
            "enable_moe_block": True,
            "num_experts": facts.whole("expert_count"),
            "top_k_experts": facts.whole("expert_used_count"),
            "moe_intermediate_size": facts.whole("expert_feed_forward_length"),
        }
    return values


def _by_layer(facts: Facts, key: str) -> list[int]:
    """Returns a number above 0 for each layer, of which the file may state one for all."""
    count, found = num_layers(facts), facts.values(key)
    if found is None:
        return [facts.whole(key)] * count
    whole = [each for each in found if type(each) is int and 0 < each <= MAX_WHOLE]
    if len(found) != count or len(whole) != count:
        raise facts.wrong(key, f"a number above 0 for each of {count} layers")
    return whole
