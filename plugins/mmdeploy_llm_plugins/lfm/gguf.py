"""Reads GGUF files of LFM2 and LFM2-VL."""

from __future__ import annotations

from mmdeploy_llm.weights.gguf.tables import (
    MAX_LAYERS,
    Change,
    GGUFTable,
    MediaModel,
    Metadata,
    TextModel,
    Tower,
    Values,
    merge_size,
    num_layers,
    side,
    tower_sizes,
)

# Files of other converters give the norm after the last layer the usual name.
NAMES = {"output_norm": "model.embedding_norm"}
CHANGES = {"shortconv.conv.weight": Change(new_axis=1)}


def _lfm2(metadata: Metadata) -> Values:
    heads = metadata.values("attention.head_count_kv")
    count = num_layers(metadata)
    is_good = heads is not None and len(heads) == count
    if heads is None or not is_good or not all(type(each) is int and each >= 0 for each in heads):
        raise metadata.wrong("attention.head_count_kv", f"a number for each of {count} layers")
    kinds = ["full_attention" if each else "conv" for each in heads]
    first = kinds.index("conv") if "conv" in kinds else 0
    return {
        "block_auto_adjust_ff_dim": False,  # the stated size is the final one
        "num_key_value_heads": max(heads) or metadata.whole("attention.head_count"),
        "layer_types": kinds,
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "conv_bias": f"blk.{first}.shortconv.in_proj.bias" in metadata.tensors,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata.number("rope.freq_base", 1e6),
        },
    }


def _lfm2moe(metadata: Metadata) -> Values:
    values = _lfm2(metadata)
    del values["block_auto_adjust_ff_dim"]
    first = metadata.whole("leading_dense_block_count", 0, low=0, high=MAX_LAYERS)
    return values | {
        "num_dense_layers": first,
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
        "use_expert_bias": f"blk.{first}.exp_probs_b.bias" in metadata.tensors,
    }


def _lfm2_vl(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    del text
    size, depth, num_heads = tower_sizes(metadata)
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": size,
        "num_hidden_layers": depth,
        "num_attention_heads": num_heads,
        "intermediate_size": metadata.whole("vision.feed_forward_length"),
        "layer_norm_eps": metadata.number("vision.attention.layer_norm_epsilon"),
        "num_patches": metadata.shape("v.position_embd.weight", 2)[0],
        "vision_use_head": False,
        "downsample_factor": merge_size(metadata, "projector.scale_factor"),
        "projector_hidden_size": metadata.shape("mm.1.weight", 2)[0],
        "projector_bias": "mm.1.bias" in metadata.tensors,
        "projector_use_layernorm": "mm.input_norm.weight" in metadata.tensors,
    }
    return vision, {"encoder_patch_size": side(metadata, "patch_size")}


TABLE = GGUFTable(
    models={
        "lfm2": TextModel(
            model_type="lfm2",
            model="Lfm2ForCausalLM",
            config=_lfm2,
            changes=CHANGES,
            names=NAMES,
            has_equal_layers=False,
        ),
        "lfm2moe": TextModel(
            model_type="lfm2_moe",
            model="Lfm2MoeForCausalLM",
            config=_lfm2moe,
            changes=CHANGES,
            names={
                **NAMES,
                "output": "lm_head",
            },
            has_equal_layers=False,
        ),
    },
    towers={
        "lfm2": Tower(
            models={
                name: MediaModel(model_type="lfm2_vl", model="Lfm2VlForConditionalGeneration")
                for name in ("lfm2", "lfm2moe")
            },
            config=_lfm2_vl,
            last="mm.2.weight",
            tokens={"image_token_id": "<image>"},
            outer=frozenset(
                {
                    "downsample_factor",
                    "projector_bias",
                    "projector_hidden_size",
                    "projector_use_layernorm",
                }
            ),
            patches="pixels",
        )
    },
)
