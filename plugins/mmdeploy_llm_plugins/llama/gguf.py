"""Reads GGUF files of Llama and of models with its architecture, such as Mistral."""

from __future__ import annotations

from mmdeploy_llm.weights.gguf.tables import (
    PERMUTED,
    GGUFTable,
    Metadata,
    TextModel,
    Values,
    has_biases,
)


def _llama(metadata: Metadata) -> Values:
    if metadata.whole("expert_count", 0, low=0):
        raise metadata.wrong("expert_count", "0: of this architecture, models without experts")
    return _biases(metadata)


def _biases(metadata: Metadata) -> Values:
    return {
        "attention_bias": has_biases(metadata, "attn_q"),
        "mlp_bias": has_biases(metadata, "ffn_up"),
    }


TABLE = GGUFTable(
    models={
        "llama": TextModel(
            model_type="llama", model="LlamaForCausalLM", config=_llama, changes=PERMUTED
        )
    }
)
