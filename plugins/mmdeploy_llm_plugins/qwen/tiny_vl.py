"""Tiny checkpoints of Qwen2-VL, Qwen3-VL and Qwen3-VL with experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import transformers

from mmdeploy_llm.testing.tiny import (
    Family,
    MediaForm,
    preprocessor_files,
    text_config,
    token_ids,
)

from .tiny import ROPE, TOKENS

HALF = [0.5, 0.5, 0.5]
QWEN3_IMAGE = {
    "image_mean": HALF,
    "image_std": HALF,
    "patch_size": 16,
    "size": {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 64},
}
QWEN3_VIDEO = {  # the pixels are those of all frames together
    **QWEN3_IMAGE,
    "size": {"shortest_edge": 4 * 64 * 64, "longest_edge": 32 * 32 * 256},
}

EXPERTS: Mapping[str, Any] = MappingProxyType(
    {
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [1],
    }
)


def _qwen2_vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = text_config(tokenizer, options, rope_parameters=dict(ROPE), tie_word_embeddings=False)
    vision = {
        "depth": 3,
        "embed_dim": 48,
        "num_heads": 4,
        "mlp_ratio": 2,
        "hidden_size": text["hidden_size"],
    }
    return transformers.Qwen2VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"],
        **token_ids(tokenizer, TOKENS),
    )


def qwen3_text(tokenizer: Any, options: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns the config of a text model of version 3 with media."""
    rope = {**ROPE, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
    return text_config(tokenizer, options, head_dim=32, rope_parameters=rope, **fields)


def qwen3_vision(text: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the config of the tower of version 3 for this text model."""
    return {
        "depth": 4,
        "hidden_size": 48,
        "num_heads": 4,
        "intermediate_size": 80,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 49,
        "deepstack_visual_indexes": [0, 2],
    }


def _qwen3_fields(tokenizer: Any, options: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns keyword arguments of Qwen3-VL's configs; head_dim is larger than hidden / heads."""
    text = qwen3_text(tokenizer, options, tie_word_embeddings=False, **fields)
    return {
        "text_config": text,
        "vision_config": qwen3_vision(text),
        "tie_word_embeddings": text["tie_word_embeddings"],
        **token_ids(tokenizer, TOKENS),
    }


def _qwen3_vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.Qwen3VLConfig(**_qwen3_fields(tokenizer, options))


def _qwen3_vl_moe(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.Qwen3VLMoeConfig(**_qwen3_fields(tokenizer, options, **EXPERTS))


def _qwen3_family(name: str, make_config: Any) -> Family:
    return Family(
        architecture=f"{name}ForConditionalGeneration",
        make_config=make_config,
        files=preprocessor_files("Qwen2VL", image=QWEN3_IMAGE, video=QWEN3_VIDEO),
        media=MediaForm(has_text_between=True),
    )


QWEN2_VL = Family(
    architecture="Qwen2VLForConditionalGeneration",
    make_config=_qwen2_vl,
    files=preprocessor_files("Qwen2VL"),
)
QWEN3_VL = _qwen3_family("Qwen3VL", _qwen3_vl)
QWEN3_VL_MOE = _qwen3_family("Qwen3VLMoe", _qwen3_vl_moe)
