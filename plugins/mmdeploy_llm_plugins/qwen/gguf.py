"""Reads GGUF files of Qwen's text and image-text models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.weights.gguf.tables import (
    ADDED_ONE,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    Change,
    GGUFTable,
    MediaModel,
    Metadata,
    Order,
    OrderOf,
    StoredTensor,
    TextModel,
    Tower,
    Values,
    check_activation,
    grid_image,
    has_biases,
    head_dim,
    merge_size,
    mlp_size,
    num_layers,
    rope_parameters,
    rope_sections,
    tower_sizes,
)

# Qwen2.5-VL: pixels along a side of a window of attention, time steps of a second.
WINDOW_PIXELS, TOKENS_PER_SECOND = 112, 2
MAX_WINDOW = 2**16
QWEN2_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384}  # of published models
MERGER = "model.visual.merger"
QKV = "model.visual.blocks.{bid}.attn.qkv"
TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
SHARED_GATE = {"ffn_gate_inp_shexp.weight": Change(new_axis=0)}
# The package `gguf` calls dt_bias by the name of a projection.
DELTA_NAMES = {"blk.{bid}.ssm_dt.bias": "model.layers.{bid}.linear_attn.dt_bias"}


def _qwen2(metadata: Metadata) -> Values:
    del metadata
    return {"use_sliding_window": False}


def _qwen3(metadata: Metadata) -> Values:
    return {"attention_bias": has_biases(metadata, "attn_q"), "use_sliding_window": False}


def _experts(metadata: Metadata) -> Values:
    return {
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.shape("blk.0.ffn_down_exps.weight", 3)[2],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def _qwen2moe(metadata: Metadata) -> Values:
    return _experts(metadata) | {
        "qkv_bias": has_biases(metadata, "attn_q"),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": metadata.shape("blk.0.ffn_down_shexp.weight", 2)[1],
    }


def _qwen2vl(metadata: Metadata) -> Values:
    shared = rope_parameters(metadata, head_dim(metadata))
    return _qwen2(metadata) | {"rope_parameters": shared | rope_sections(metadata)}


def _qwen3vl(metadata: Metadata) -> Values:
    shared = rope_parameters(metadata, head_dim(metadata), theta=5e6)
    return {
        "attention_bias": has_biases(metadata, "attn_q"),
        "rope_parameters": shared | rope_sections(metadata) | {"mrope_interleaved": True},
    }


def _qwen3vlmoe(metadata: Metadata) -> Values:
    return _experts(metadata) | _qwen3vl(metadata)


def _qwen3moe(metadata: Metadata) -> Values:
    biases = {"attention_bias": has_biases(metadata, "attn_q")}
    return _experts(metadata) | biases | {"norm_topk_prob": True}


def _qwen35(metadata: Metadata) -> Values:
    period = metadata.whole("full_attention_interval", 4)
    num_values = metadata.whole("ssm.time_step_rank")
    shared = rope_parameters(metadata, metadata.whole("attention.key_length", high=MAX_HEAD_DIM))
    return {
        "attention_bias": f"blk.{period - 1}.attn_q.bias" in metadata.tensors,
        "layer_types": [
            "linear_attention" if (i + 1) % period else "full_attention"
            for i in range(num_layers(metadata))
        ],
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_num_key_heads": metadata.whole("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_value_head_dim": max(1, metadata.whole("ssm.inner_size") // num_values),
        "rope_parameters": shared | rope_sections(metadata) | {"mrope_interleaved": True},
    }


def _qwen35moe(metadata: Metadata) -> Values:
    experts = _experts(metadata)
    kept = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return _qwen35(metadata) | {
        **{name: experts[name] for name in kept},
        "shared_expert_intermediate_size": metadata.shape("blk.0.ffn_down_shexp.weight", 2)[1],
    }


def _qwen3next(metadata: Metadata) -> Values:
    values = _qwen35(metadata)
    for name in ("mrope_section", "mrope_interleaved"):
        values["rope_parameters"].pop(name, None)
    shared = metadata.shape("blk.0.ffn_down_shexp.weight", 2)[1]
    experts = _experts(metadata) | {"shared_expert_intermediate_size": shared}
    del experts["use_sliding_window"]
    return values | experts | {"norm_topk_prob": True}


def _pixels(metadata: Metadata, default: Mapping[str, int]) -> Values:
    keys = {"min_pixels": "vision.image_min_pixels", "max_pixels": "vision.image_max_pixels"}
    return {name: metadata.whole(key, default[name]) for name, key in keys.items()}


def _mlp_ratio(metadata: Metadata, size: int) -> int:
    """Returns how many times as many channels an MLP has inside."""
    ratio, rest = divmod(mlp_size(metadata, size), size)
    if rest or not ratio:
        raise CheckpointError(
            f"v.blk.0.ffn_up.weight of {metadata.header.paths[0]} has {ratio * size + rest} rows, "
            f"which are no multiple of {size}; download the file again"
        )
    return ratio


def _tower2(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    size, depth, num_heads = tower_sizes(metadata)
    vision = {
        "depth": depth,
        "embed_dim": size,
        "num_heads": num_heads,
        # The converter writes another number as feed_forward_length.
        "mlp_ratio": _mlp_ratio(metadata, size),
        "hidden_size": text["hidden_size"],
        "hidden_act": check_activation(metadata, "quick_gelu"),
        "spatial_merge_size": merge_size(metadata),
    }
    return vision, {**grid_image(metadata), **_pixels(metadata, QWEN2_PIXELS)}


def _tower25(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    size, depth, num_heads = tower_sizes(metadata)
    period = metadata.whole("vision.n_wa_pattern", high=MAX_LAYERS)
    vision = {
        "depth": depth,
        "hidden_size": size,
        "num_heads": num_heads,
        "intermediate_size": mlp_size(metadata, size),
        "out_hidden_size": text["hidden_size"],
        "hidden_act": check_activation(metadata, "silu"),
        "spatial_merge_size": merge_size(metadata),
        "fullatt_block_indexes": list(range(period - 1, depth, period)),
        "window_size": metadata.whole("vision.window_size", WINDOW_PIXELS, high=MAX_WINDOW),
        "tokens_per_second": TOKENS_PER_SECOND,
    }
    return vision, {**grid_image(metadata), **_pixels(metadata, QWEN2_PIXELS)}


def _tower3(metadata: Metadata, text: Values) -> tuple[Values, Values]:
    size, depth, num_heads = tower_sizes(metadata)
    tapped = metadata.values("vision.is_deepstack_layers") or ()
    vision = {
        "depth": depth,
        "hidden_size": size,
        "num_heads": num_heads,
        "intermediate_size": metadata.whole("vision.feed_forward_length"),
        "out_hidden_size": text["hidden_size"],
        "hidden_act": "gelu_pytorch_tanh",
        "spatial_merge_size": merge_size(metadata),
        "num_position_embeddings": metadata.shape("v.position_embd.weight", 2)[0],
        "deepstack_visual_indexes": [i for i, tap in enumerate(tapped[:depth]) if tap],
    }
    return vision, grid_image(metadata)


def _tiled(kind: str) -> OrderOf:
    """Returns the order of value heads: those of one key head lay side by side and became one of
    each key head in turn.

    kind: which rows of a tensor they are: "values": all; "heads": one row for each; "after keys":
        those after queries and keys; "columns": they are its columns.
    """

    def order(metadata: Metadata, tensor: StoredTensor) -> Order:
        num_keys = metadata.whole("ssm.group_count")
        num_values = metadata.whole("ssm.time_step_rank")
        size = 1 if kind == "heads" else metadata.whole("ssm.inner_size") // num_values
        length = tensor.shape[-1] if kind == "columns" else tensor.shape[0]
        offset = 2 * num_keys * metadata.whole("ssm.state_size") if kind == "after keys" else 0
        if size < 1 or num_values % num_keys or length != offset + num_values * size:
            raise CheckpointError(
                f"{tensor.name} of {metadata.header.paths[0]} has the shape {list(tensor.shape)}, "
                f"which does not fit {num_values} value heads of {num_keys} key heads"
            )
        return Order(first=num_keys, second=num_values // num_keys, size=size, offset=offset)

    return order


DELTA = {  # of the layers whose cache is a state
    "ssm_norm.weight": Change(),
    **ADDED_ONE,
    "ssm_a": Change(is_log=True),
    "ssm_conv1d.weight": Change(new_axis=1),
}
TILED = {
    **DELTA,
    "ssm_a": Change(is_log=True, rows=_tiled("heads")),
    "ssm_dt.bias": Change(rows=_tiled("heads")),
    "ssm_alpha.*": Change(rows=_tiled("heads")),
    "ssm_beta.*": Change(rows=_tiled("heads")),
    "attn_qkv.*": Change(rows=_tiled("after keys")),
    "attn_gate.*": Change(rows=_tiled("values")),
    "ssm_conv1d.weight": Change(new_axis=1, rows=_tiled("after keys")),
    "ssm_out.*": Change(columns=_tiled("columns")),
}
QWEN35 = TextModel(
    model_type="qwen3_5_text",
    model="Qwen3_5ForCausalLM",
    config=_qwen35,
    changes=TILED,
    names=DELTA_NAMES,
    has_extra_layers=True,
)
FRAMES = {"v.patch_embd.weight.1": "model.visual.patch_embed.proj.weight"}


def _tower(name: str, model_type: str, config: Callable[..., tuple[Values, Values]]) -> Tower:
    """Returns the tower of Qwen2-VL or Qwen2.5-VL, where three tensors were one matrix."""
    model = MediaModel(model_type=model_type, model=name, text_type=f"{model_type}_text")
    return Tower(
        models={"qwen2vl": model},
        config=config,
        last="mm.2.weight",
        tokens=TOKENS,
        names={**FRAMES, **{f"v.blk.{{bid}}.attn_{part}": QKV for part in "qkv"}},
        patches="frames",
    )


TABLE = GGUFTable(
    models={
        "qwen2": TextModel(model_type="qwen2", model="Qwen2ForCausalLM", config=_qwen2),
        "qwen2moe": TextModel(
            model_type="qwen2_moe",
            model="Qwen2MoeForCausalLM",
            config=_qwen2moe,
            changes=SHARED_GATE,
        ),
        "qwen3": TextModel(model_type="qwen3", model="Qwen3ForCausalLM", config=_qwen3),
        "qwen3moe": TextModel(
            model_type="qwen3_moe", model="Qwen3MoeForCausalLM", config=_qwen3moe
        ),
        "qwen2vl": TextModel(
            model_type="qwen2_vl_text",
            model="Qwen2VLForConditionalGeneration",
            config=_qwen2vl,
            needs_tower=True,
        ),
        "qwen3vl": TextModel(
            model_type="qwen3_vl_text",
            model="Qwen3VLForConditionalGeneration",
            config=_qwen3vl,
            needs_tower=True,
        ),
        "qwen3vlmoe": TextModel(
            model_type="qwen3_vl_moe_text",
            model="Qwen3VLMoeForConditionalGeneration",
            config=_qwen3vlmoe,
            needs_tower=True,
        ),
        "qwen35": QWEN35,
        "qwen35moe": replace(
            QWEN35,
            model_type="qwen3_5_moe_text",
            model="Qwen3_5MoeForCausalLM",
            config=_qwen35moe,
            changes={**TILED, **SHARED_GATE},
            has_mlp_size=False,  # all layers have experts, and the files state no other size
        ),
        "qwen3next": replace(
            QWEN35,
            model_type="qwen3_next",
            model="Qwen3NextForCausalLM",
            config=_qwen3next,
            changes={**DELTA, **SHARED_GATE},
        ),
    },
    towers={
        "qwen2vl_merger": _tower("Qwen2VLForConditionalGeneration", "qwen2_vl", _tower2),
        "qwen2.5vl_merger": _tower("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", _tower25),
        "qwen3vl_merger": Tower(
            models={
                "qwen3vl": MediaModel(
                    model_type="qwen3_vl", model="Qwen3VLForConditionalGeneration"
                ),
                "qwen3vlmoe": MediaModel(
                    model_type="qwen3_vl_moe", model="Qwen3VLMoeForConditionalGeneration"
                ),
                "qwen35": MediaModel(model_type="qwen3_5", model="Qwen3_5ForConditionalGeneration"),
                "qwen35moe": MediaModel(
                    model_type="qwen3_5_moe", model="Qwen3_5MoeForConditionalGeneration"
                ),
            },
            config=_tower3,
            last="mm.2.weight",
            tokens=TOKENS,
            names={
                **FRAMES,
                "v.post_ln": f"{MERGER}.norm",
                "mm.0": f"{MERGER}.linear_fc1",
                "mm.2": f"{MERGER}.linear_fc2",
            },
            patches="frames",
        ),
    },
)
