"""Tiny checkpoints of Phi-3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.tiny import Family, text_config

TEMPLATE = (
    "{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>\n' ~ m.content ~ '<|end|>\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)


def _phi3(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.Phi3Config(**text_config(tokenizer, options, sliding_window=9))


PHI3 = Family(
    architecture="Phi3ForCausalLM",
    make_config=_phi3,
    chat_template=TEMPLATE,
    eos_token="<|end|>",
    special_tokens=("<|end|>",),
)
