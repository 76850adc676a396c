"""Tiny checkpoints of OLMoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.tiny import Family, text_config

TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>\n' ~ m.content ~ '\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)


def _olmoe(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = text_config(tokenizer, options, num_experts=6, num_experts_per_tok=2)
    return transformers.OlmoeConfig(**fields)


OLMOE = Family(
    architecture="OlmoeForCausalLM",
    make_config=_olmoe,
    chat_template=TEMPLATE,
    eos_token="</s>",
)
