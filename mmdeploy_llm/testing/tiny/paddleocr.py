"""A tiny checkpoint of PaddleOCR-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from .common import ERNIE_TOKENS, Family, preprocessor_files, text_config, token_ids

TEMPLATE = (
    "{{- '<|begin_of_sentence|>' -}}{%- for m in messages -%}"
    "{{- 'User: ' if m.role == 'user' else 'Assistant:\\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for p in m.content -%}"
    "{%- if p.type in ['image', 'image_url'] -%}"
    "{{- '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' -}}"
    "{%- else -%}{{- p.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '</s>' if m.role == 'assistant' else '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant:\\n' -}}{%- endif -%}"
)
TOKENS = {
    "vision_start_token_id": "<|IMAGE_START|>",
    "vision_end_token_id": "<|IMAGE_END|>",
    "image_token_id": ERNIE_TOKENS["image_token_id"],
    "video_token_id": ERNIE_TOKENS["video_token_id"],
}


def _paddleocr_vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = text_config(
        tokenizer, options, head_dim=16, rope_parameters=rope, tie_word_embeddings=False
    )
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 84,
    }
    return transformers.PaddleOCRVLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"],
        **token_ids(tokenizer, TOKENS),
    )


def _files() -> dict[str, dict[str, Any]]:
    files = preprocessor_files("PaddleOCRVL", image={"temporal_patch_size": 1})
    del files["video_preprocessor_config.json"]
    return files


FAMILIES: Mapping[str, Family] = {
    "paddleocr_vl": Family(
        architecture="PaddleOCRVLForConditionalGeneration",
        make_config=_paddleocr_vl,
        chat_template=TEMPLATE,
        eos_token="</s>",
        files=_files(),
    ),
}
