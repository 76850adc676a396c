"""Tiny checkpoints of OLMoE."""

from __future__ import annotations

from mmdeploy_llm.testing.tiny import text_family

TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>\n' ~ m.content ~ '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)

OLMOE = text_family(
    "OlmoeForCausalLM",
    chat_template=TEMPLATE,
    eos_token="</s>",
    num_experts=6,
    num_experts_per_tok=2,
)
