"""Tiny checkpoints of GLM-4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.tiny import Family, text_config

TEMPLATE = (
    "{{- '[gMASK]<sop>' -}}{%- for m in messages -%}"
    "{{- '<|' ~ m.role ~ '|>\\n' ~ m.content -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)
SPECIAL_TOKENS = ("[gMASK]", "<sop>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>")


def _glm(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.GlmConfig(**text_config(tokenizer, options, head_dim=20))


def _glm4(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.Glm4Config(**text_config(tokenizer, options, head_dim=20))


GLM = Family(
    architecture="GlmForCausalLM",
    make_config=_glm,
    chat_template=TEMPLATE,
    eos_token="<|endoftext|>",
    special_tokens=SPECIAL_TOKENS,
)
GLM4 = Family(
    architecture="Glm4ForCausalLM",
    make_config=_glm4,
    chat_template=TEMPLATE,
    eos_token="<|user|>",
    special_tokens=SPECIAL_TOKENS,
)
