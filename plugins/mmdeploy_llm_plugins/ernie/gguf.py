"""Reads GGUF files of the text models of ERNIE 4.5."""

from __future__ import annotations

from mmdeploy_llm.weights.gguf.tables import (
    MAX_LAYERS,
    Change,
    GGUFTable,
    Metadata,
    TextModel,
    Values,
    has_biases,
)


def _ernie(metadata: Metadata) -> Values:
    return {"use_bias": has_biases(metadata, "attn_q")}


def _ernie_moe(metadata: Metadata) -> Values:
    first = metadata.whole("leading_dense_block_count", 0, low=0, high=MAX_LAYERS)
    period = metadata.whole("interleave_moe_layer_step", 1, high=MAX_LAYERS)
    sparse = next(i for i in range(first, first + period) if (i + 1) % period == 0)
    return _ernie(metadata) | {
        "moe_num_experts": metadata.whole("expert_count"),
        "moe_k": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.shape(f"blk.{sparse}.ffn_down_exps.weight", 3)[2],
        "moe_num_shared_experts": metadata.whole("expert_shared_count", 0, low=0),
        "moe_layer_start_index": first,
        "moe_layer_interval": period,
    }


TABLE = GGUFTable(
    models={
        "ernie4_5": TextModel(model_type="ernie4_5", model="Ernie4_5ForCausalLM", config=_ernie),
        "ernie4_5-moe": TextModel(
            model_type="ernie4_5_moe",
            model="Ernie4_5_MoeForCausalLM",
            config=_ernie_moe,
            changes={"exp_probs_b.bias": Change(new_axis=0)},
        ),
    }
)
