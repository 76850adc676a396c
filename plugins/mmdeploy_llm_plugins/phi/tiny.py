"""Tiny checkpoints of Phi-3."""

from __future__ import annotations

from mmdeploy_llm.testing.tiny import text_family

TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)

PHI3 = text_family(
    "Phi3ForCausalLM",
    chat_template=TEMPLATE,
    eos_token="<|end|>",
    special_tokens=("<|end|>",),
    sliding_window=9,
)
