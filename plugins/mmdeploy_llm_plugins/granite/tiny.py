"""Tiny checkpoints of Granite, dense and with Mamba-2 layers, and of Bamba."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.testing.tiny import text_family

FACTORS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}

MAMBA: dict[str, Any] = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
}

GRANITE = text_family("GraniteForCausalLM", **FACTORS)
GRANITE_HYBRID = text_family(
    "GraniteMoeHybridForCausalLM",
    layer_types=["mamba", "attention", "mamba", "mamba"],
    shared_intermediate_size=40,
    num_local_experts=4,
    **MAMBA,
    **FACTORS,
)
BAMBA = text_family("BambaForCausalLM", attn_layer_indices=[1], **MAMBA)
