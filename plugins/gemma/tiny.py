"""Tiny checkpoints of Gemma, Gemma 2 and Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.tiny import Family, text_config

TEMPLATE = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{{- '<start_of_turn>' ~ m.role ~ '\\n' ~ m.content ~ '<end_of_turn>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)
LOCAL = {"sliding_window": 7, "query_pre_attn_scalar": 20, "tie_word_embeddings": True}


def _gemma(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.GemmaConfig(**text_config(tokenizer, options, head_dim=20))


def _gemma2(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = text_config(
        tokenizer,
        options,
        head_dim=16,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=3.0,
        **LOCAL,
    )
    return transformers.Gemma2Config(**fields, attn_implementation="eager")


def _gemma3(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    rope = {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    fields = text_config(
        tokenizer, options, head_dim=16, rope_parameters=rope, layer_types=kinds, **LOCAL
    )
    return transformers.Gemma3TextConfig(**fields)


def _family(architecture: str, make_config: Any) -> Family:
    return Family(
        architecture=architecture,
        make_config=make_config,
        chat_template=TEMPLATE,
        eos_token="</s>",
    )


GEMMA = _family("GemmaForCausalLM", _gemma)
GEMMA2 = _family("Gemma2ForCausalLM", _gemma2)
GEMMA3_TEXT = _family("Gemma3ForCausalLM", _gemma3)
