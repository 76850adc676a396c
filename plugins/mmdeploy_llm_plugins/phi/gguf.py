"""Reads GGUF files of Phi-3."""

from __future__ import annotations

from mmdeploy_llm.weights.gguf.tables import (
    GGUFTable,
    Metadata,
    TextModel,
    Values,
    factors_of,
    rope_parameters,
)


def _phi3(metadata: Metadata) -> Values:
    positions = metadata.whole("context_length")
    original = metadata.whole("rope.scaling.original_context_length", positions)
    values: Values = {
        "sliding_window": metadata.whole("attention.sliding_window", 0, low=0) or None,
        "original_max_position_embeddings": original,
    }
    if "rope_factors_long.weight" in metadata.tensors:
        size = metadata.whole("embedding_length") // metadata.whole("attention.head_count")
        values["rope_parameters"] = rope_parameters(metadata, max(1, size)) | {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "long_factor": factors_of(metadata.header, "rope_factors_long.weight"),
            "short_factor": factors_of(metadata.header, "rope_factors_short.weight"),
        }
    return values


TABLE = GGUFTable(
    models={
        "phi3": TextModel(
            model_type="phi3",
            model="Phi3ForCausalLM",
            config=_phi3,
            # Gate and up projection in one, which the package `gguf` knows by another name first.
            names={"blk.{bid}.ffn_up": "model.layers.{bid}.mlp.gate_up_proj"},
        )
    }
)
