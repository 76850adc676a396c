"""Reads GGUF files of Gemma, Gemma 2, the text model of Gemma 3, and Gemma 4."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.gguf.tables import (
    ADDED_ONE,
    FREQUENCY_FACTORS,
    MAX_HEAD_DIM,
    MAX_WHOLE,
    GGUFTable,
    MediaModel,
    Metadata,
    Scalar,
    TextModel,
    Tower,
    Values,
    factors_of,
    has_biases,
    head_dim,
    merge_size,
    num_layers,
    rope_parameters,
    side,
    tower_sizes,
)

PERIOD = 6  # every so many layers of Gemma 3, one attends to everything
# llama.cpp knows these models, whose scores are scaled by other channels, by their layers.
WIDE_HEADS = MappingProxyType({"gemma2": 46, "gemma3": 62})
NOT_ROTATED = 1e20  # and larger factors: the angles vanish
HEAD = {"output": "lm_head"}
TOWER = "model.vision_tower.encoder.layers.{bid}"


def _gemma(metadata: Metadata) -> Values:
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


def _gemma2(metadata: Metadata) -> Values:
    """Describes Gemma 2."""
    return _gemma(metadata) | {
        "attn_logit_softcapping": metadata.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": metadata.number("final_logit_softcapping", 30.0),
        "sliding_window": metadata.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _score_scalar(metadata),
        "layer_types": _layer_types(metadata, 2),
    }


def _gemma3(metadata: Metadata) -> Values:
    """Describes the text model of Gemma 3."""
    values = _gemma(metadata) | {"query_pre_attn_scalar": _score_scalar(metadata)}
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


def _gemma4(metadata: Metadata) -> Values:
    """Describes the text model of Gemma 4."""
    kinds = _layer_types(metadata, PERIOD)
    sizes = _by_layer(metadata, "feed_forward_length")
    heads = _by_layer(metadata, "attention.head_count_kv")
    local = kinds.index("sliding_attention") if "sliding_attention" in kinds else 0
    full = kinds.index("full_attention") if "full_attention" in kinds else local
    per_layer = metadata.whole("embedding_length_per_layer_input", 0, low=0)
    values = _gemma(metadata) | {
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
            "full_attention": _proportional_rope(metadata),
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


def _proportional_rope(metadata: Metadata) -> Values:
    """Returns the parameters of Gemma 4's layers without a window: those channels are rotated whose
    factor is 1; the others have huge ones. Raises CheckpointError for other factors."""
    stored = factors_of(metadata.header, FREQUENCY_FACTORS)
    num_rotated = sum(factor == 1 for factor in stored)
    if any(factor != 1 for factor in stored[:num_rotated]) or any(
        factor < NOT_ROTATED for factor in stored[num_rotated:]
    ):
        raise CheckpointError(
            f"{FREQUENCY_FACTORS} of {metadata.header.paths[0]} scales frequencies in a way that "
            "is not Gemma 4's; put the model's config.json into the folder, which says how"
        )
    return {
        "rope_type": "proportional",
        "rope_theta": metadata.number("rope.freq_base", 1e6),
        "partial_rotary_factor": num_rotated / len(stored),
    }


def _gemma4_tower(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    del text
    size, depth, num_heads = tower_sizes(metadata)
    merge = merge_size(metadata, "projector.scale_factor", 3)
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
        "patch_size": side(metadata, "patch_size"),
        "pooling_kernel_size": merge,
    }


TABLE = GGUFTable(
    models={
        "gemma": TextModel(
            model_type="gemma",
            model="GemmaForCausalLM",
            config=_gemma,
            changes=ADDED_ONE,
            names=HEAD,
        ),
        "gemma2": TextModel(
            model_type="gemma2",
            model="Gemma2ForCausalLM",
            config=_gemma2,
            changes=ADDED_ONE,
            names=HEAD,
        ),
        "gemma3": TextModel(
            model_type="gemma3_text",
            model="Gemma3ForCausalLM",
            config=_gemma3,
            changes=ADDED_ONE,
        ),
        "gemma4": TextModel(
            model_type="gemma4_text",
            model="Gemma4ForCausalLM",
            config=_gemma4,
            names={
                "blk.{bid}.ffn_gate_inp.scale": "model.layers.{bid}.router.scale",
                "blk.{bid}.ffn_down_exps.scale": "model.layers.{bid}.router.per_expert_scale",
            },
            has_equal_layers=False,
            has_mlp_size=False,
        ),
    },
    towers={
        "gemma4v": Tower(
            models={
                "gemma4": MediaModel(model_type="gemma4", model="Gemma4ForConditionalGeneration")
            },
            config=_gemma4_tower,
            last="mm.input_projection.weight",
            tokens={
                "image_token_id": "<|image|>",
                "video_token_id": "<|video|>",
                "boi_token_id": "<|image>",
                "eoi_token_id": "<image|>",
            },
            names={
                "v.blk.{bid}.ln1": f"{TOWER}.input_layernorm",
                "v.blk.{bid}.ln2": f"{TOWER}.pre_feedforward_layernorm",
                "v.blk.{bid}.attn_q_norm": f"{TOWER}.self_attn.q_norm",
                "v.blk.{bid}.attn_k_norm": f"{TOWER}.self_attn.k_norm",
                "v.blk.{bid}.attn_post_norm": f"{TOWER}.post_attention_layernorm",
                "v.blk.{bid}.ffn_post_norm": f"{TOWER}.post_feedforward_layernorm",
                "v.blk.{bid}.attn_q": f"{TOWER}.self_attn.q_proj",
                "v.blk.{bid}.attn_k": f"{TOWER}.self_attn.k_proj",
                "v.blk.{bid}.attn_v": f"{TOWER}.self_attn.v_proj",
                "v.blk.{bid}.attn_out": f"{TOWER}.self_attn.o_proj",
                "v.blk.{bid}.ffn_gate": f"{TOWER}.mlp.gate_proj",
                "v.blk.{bid}.ffn_up": f"{TOWER}.mlp.up_proj",
                "v.blk.{bid}.ffn_down": f"{TOWER}.mlp.down_proj",
            },
            patches="pixels",
            ignored=("a.", "mm.a."),
        )
    },
)
