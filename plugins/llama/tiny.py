"""Tiny checkpoints of Llama and Mistral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.tiny import Family, text_config

TEMPLATE = (
    "{{- bos_token -}}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{{- '[INST] ' ~ m.content ~ ' [/INST]' -}}"
    "{%- else -%}{{- ' ' ~ m.content ~ eos_token -}}{%- endif -%}{%- endfor -%}"
)


def _llama(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.LlamaConfig(**text_config(tokenizer, options, head_dim=20))


def _mistral(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.MistralConfig(**text_config(tokenizer, options, sliding_window=7))


LLAMA = Family(
    architecture="LlamaForCausalLM",
    make_config=_llama,
    chat_template=TEMPLATE,
    eos_token="</s>",
)
MISTRAL = Family(
    architecture="MistralForCausalLM",
    make_config=_mistral,
    chat_template=TEMPLATE,
    eos_token="</s>",
)
