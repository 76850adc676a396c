"""Tiny checkpoints of Llama and Mistral."""

from __future__ import annotations

from mmdeploy_llm.testing.tiny import text_family

TEMPLATE = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{{- '[INST] ' ~ m.content ~ ' [/INST]' -}}"
    "{%- else -%}{{- ' ' ~ m.content ~ eos_token -}}{%- endif -%}{%- endfor -%}"
)

LLAMA = text_family("LlamaForCausalLM", chat_template=TEMPLATE, eos_token="</s>", head_dim=20)
MISTRAL = text_family(
    "MistralForCausalLM", chat_template=TEMPLATE, eos_token="</s>", sliding_window=7
)
