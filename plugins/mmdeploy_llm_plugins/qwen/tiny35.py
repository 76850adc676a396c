"""Tiny checkpoints of Qwen3-Next and of Qwen3.5, dense and with experts, with and without media."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.testing.tiny import Family, text_config, token_ids

from .tiny import TOKENS
from .tiny_vl import QWEN3_VL

EXPERTS = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 6,
    "num_experts_per_tok": 2,
}


def _text_fields(tokenizer: Any, options: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns keyword arguments of the text configs: three layers of linear attention, then one of
    full attention; half of the channels of a head are rotated."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
    return text_config(
        tokenizer,
        options,
        num_hidden_layers=4,
        head_dim=32,
        rope_parameters=rope,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=12,
        **fields,
    )


def _dense(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.Qwen3_5TextConfig(**_text_fields(tokenizer, options))


def _experts(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _text_fields(tokenizer, options, **EXPERTS)
    del fields["intermediate_size"]
    return transformers.Qwen3_5MoeTextConfig(**fields)


def _vision(text: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 48,
        "num_heads": 4,
        "intermediate_size": 80,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 49,
    }


def _vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = _text_fields(tokenizer, options)
    return transformers.Qwen3_5Config(
        text_config=text,
        vision_config=_vision(text),
        tie_word_embeddings=True,
        **token_ids(tokenizer, TOKENS),
    )


def _vl_experts(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = _text_fields(tokenizer, options, **EXPERTS)
    del text["intermediate_size"]
    return transformers.Qwen3_5MoeConfig(
        text_config=text,
        vision_config=_vision(text),
        tie_word_embeddings=False,
        **token_ids(tokenizer, TOKENS),
    )


def _family(architecture: str, make_config: Any, *, has_media: bool) -> Family:
    return Family(
        architecture=architecture,
        make_config=make_config,
        files=QWEN3_VL.files if has_media else {},
        media=QWEN3_VL.media,
    )


def _next(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _text_fields(tokenizer, options, **EXPERTS)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return transformers.Qwen3NextConfig(
        **{"mlp_only_layers": [1], **fields, "rope_parameters": rope}
    )


QWEN3_NEXT = _family("Qwen3NextForCausalLM", _next, has_media=False)
QWEN3_5_TEXT = _family("Qwen3_5ForCausalLM", _dense, has_media=False)
QWEN3_5_MOE_TEXT = _family("Qwen3_5MoeForCausalLM", _experts, has_media=False)
QWEN3_5 = _family("Qwen3_5ForConditionalGeneration", _vl, has_media=True)
QWEN3_5_MOE = _family("Qwen3_5MoeForConditionalGeneration", _vl_experts, has_media=True)
