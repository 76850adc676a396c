"""Reads GGUF files of Granite."""

from __future__ import annotations

from mmdeploy_llm.weights.gguf.tables import (
    PERMUTED,
    Change,
    GGUFTable,
    Metadata,
    TextModel,
    Values,
    has_biases,
    head_dim,
    num_layers,
)

# Of layers of Mamba-2. The package `gguf` calls dt_bias by the name of a projection.
MAMBA = {
    "ssm_a": Change(is_log=True, is_flat=True),
    "ssm_d": Change(is_flat=True),
    "ssm_norm.weight": Change(is_flat=True),
    "ssm_conv1d.weight": Change(new_axis=1),
}


def _biases(metadata: Metadata) -> Values:
    return {
        "attention_bias": has_biases(metadata, "attn_q"),
        "mlp_bias": has_biases(metadata, "ffn_up"),
    }


def _granite(metadata: Metadata) -> Values:
    return _biases(metadata) | {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", head_dim(metadata) ** -0.5),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _granite_hybrid(metadata: Metadata) -> Values:
    count, inner = num_layers(metadata), metadata.whole("ssm.inner_size")
    kinds = metadata.values("attention.head_count_kv")
    if kinds is None or len(kinds) != count:
        raise metadata.wrong("attention.head_count_kv", f"a number for each of {count} layers")
    num_heads, size = metadata.whole("ssm.time_step_rank"), metadata.whole("embedding_length")
    mamba = next((i for i, each in enumerate(kinds) if not each), 0)
    num_experts = metadata.whole("expert_count", 0, low=0)
    is_rotated = metadata.header.values.get("granitehybrid.rope.scaling.finetuned") is True
    values = _granite(metadata) | {
        "layer_types": ["attention" if each else "mamba" for each in kinds],
        "mamba_n_heads": num_heads,
        "mamba_d_head": max(1, inner // num_heads),
        "mamba_n_groups": metadata.whole("ssm.group_count"),
        "mamba_d_state": metadata.whole("ssm.state_size"),
        "mamba_d_conv": metadata.whole("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // size),
        "mamba_conv_bias": f"blk.{mamba}.ssm_conv1d.bias" in metadata.tensors,
        "mamba_proj_bias": f"blk.{mamba}.ssm_in.bias" in metadata.tensors,
        "num_local_experts": num_experts,
        "position_embedding_type": "rope" if is_rotated else None,
    }
    del values["mlp_bias"]
    if num_experts:
        values["num_experts_per_tok"] = metadata.whole("expert_used_count")
    shared = metadata.whole(
        "expert_shared_feed_forward_length", metadata.whole("feed_forward_length")
    )
    return values | {"shared_intermediate_size": shared}


TABLE = GGUFTable(
    models={
        "granite": TextModel(
            model_type="granite", model="GraniteForCausalLM", config=_granite, changes=PERMUTED
        ),
        "granitehybrid": TextModel(
            model_type="granitemoehybrid",
            model="GraniteMoeHybridForCausalLM",
            config=_granite_hybrid,
            changes={**PERMUTED, **MAMBA},
            names={"blk.{bid}.ssm_dt.bias": "model.layers.{bid}.mamba.dt_bias"},
        ),
    }
)
