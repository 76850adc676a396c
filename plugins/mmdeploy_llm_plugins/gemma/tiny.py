"""Tiny checkpoints of Gemma, Gemma 2 and Gemma 3."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.testing.tiny import Family, text_family

TEMPLATE = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{{- '<start_of_turn>' ~ m.role ~ '\\n' ~ m.content ~ '<end_of_turn>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)
LOCAL: dict[str, Any] = {
    "sliding_window": 7,
    "query_pre_attn_scalar": 20,
    "tie_word_embeddings": True,
}
ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def _family(architecture: str, **fields: Any) -> Family:
    return text_family(architecture, chat_template=TEMPLATE, eos_token="</s>", **fields)


GEMMA = _family("GemmaForCausalLM", head_dim=20)
GEMMA2 = _family(
    "Gemma2ForCausalLM",
    head_dim=16,
    attn_logit_softcapping=2.0,
    final_logit_softcapping=3.0,
    attn_implementation="eager",
    **LOCAL,
)
GEMMA3_TEXT = _family(
    "Gemma3ForCausalLM",
    head_dim=16,
    rope_parameters=ROPE,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    **LOCAL,
)
