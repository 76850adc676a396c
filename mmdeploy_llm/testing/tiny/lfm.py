"""Tiny checkpoints of LFM2 and LFM2-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from .common import Family, text_config
from .qwen import TEMPLATE


def _lfm2(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = text_config(
        tokenizer,
        options,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_multiple_of=16,
    )
    return transformers.Lfm2Config(**fields)


def _lfm2_moe(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = text_config(
        tokenizer,
        options,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        routed_scaling_factor=1.5,
    )
    return transformers.Lfm2MoeConfig(**fields)


FAMILIES: Mapping[str, Family] = {
    "lfm2": Family(
        architecture="Lfm2ForCausalLM",
        make_config=_lfm2,
        chat_template=TEMPLATE,
        eos_token="<|im_end|>",
    ),
    "lfm2_moe": Family(
        architecture="Lfm2MoeForCausalLM",
        make_config=_lfm2_moe,
        chat_template=TEMPLATE,
        eos_token="<|im_end|>",
    ),
}
