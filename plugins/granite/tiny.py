"""Tiny checkpoints of Granite, dense and with Mamba-2 layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.tiny import CHATML, Family, text_config

FACTORS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 0.5,
}


def _granite(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.GraniteConfig(**text_config(tokenizer, options, **FACTORS))


def _hybrid(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    kinds = ["mamba", "attention", "mamba", "mamba"]
    fields = text_config(
        tokenizer,
        options,
        num_hidden_layers=4,
        layer_types=kinds,
        shared_intermediate_size=40,
        num_local_experts=4,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=12,
        mamba_expand=2,
        **FACTORS,
    )
    return transformers.GraniteMoeHybridConfig(**fields)


def _family(architecture: str, make_config: Any) -> Family:
    return Family(
        architecture=architecture,
        make_config=make_config,
        chat_template=CHATML,
        eos_token="<|im_end|>",
    )


GRANITE = _family("GraniteForCausalLM", _granite)
GRANITE_HYBRID = _family("GraniteMoeHybridForCausalLM", _hybrid)
