"""Tiny checkpoints of Qwen: text models and Qwen2.5-VL."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import transformers

from mmdeploy_llm.testing.tiny import (
    Family,
    preprocessor_files,
    text_config,
    text_family,
    token_ids,
)

TOKENS = {
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
}


# Positions in time, rows and columns.
ROPE: Mapping[str, Any] = MappingProxyType(
    {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
)


def vision_config(text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the tower of version 2.5 for this text model."""
    return {
        "depth": 3,
        "hidden_size": 64,
        "num_heads": 4,
        "intermediate_size": 96,
        "out_hidden_size": text["hidden_size"],
        "fullatt_block_indexes": [1],
        "window_size": 112,
    }


def _qwen_vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = text_config(tokenizer, options, rope_parameters=dict(ROPE), tie_word_embeddings=True)
    return transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision_config(text),
        tie_word_embeddings=text["tie_word_embeddings"],
        **token_ids(tokenizer, TOKENS),
    )


QWEN2 = text_family(
    "Qwen2ForCausalLM", hidden_size=60, num_attention_heads=6, tie_word_embeddings=False
)
QWEN2_MOE = text_family(
    "Qwen2MoeForCausalLM",
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
    num_experts=6,
    num_experts_per_tok=2,
    mlp_only_layers=[0],
)
QWEN3 = text_family("Qwen3ForCausalLM", head_dim=20)
QWEN3_MOE = text_family(
    "Qwen3MoeForCausalLM",
    head_dim=20,
    num_hidden_layers=4,
    moe_intermediate_size=24,
    num_experts=6,
    num_experts_per_tok=2,
    decoder_sparse_step=2,
    norm_topk_prob=True,
)
QWEN2_5_VL = Family(
    architecture="Qwen2_5_VLForConditionalGeneration",
    make_config=_qwen_vl,
    files=preprocessor_files("Qwen2VL"),
)
