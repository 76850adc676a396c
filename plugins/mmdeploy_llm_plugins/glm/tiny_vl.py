"""Tiny checkpoints of GLM-4V, dense and with experts, and of GLM-OCR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from mmdeploy_llm.testing.tiny import Family, MediaForm, preprocessor_files, text_config, token_ids

from .tiny import EXPERTS, SPECIAL_TOKENS

TOKENS = {
    "image_start_token_id": "<|begin_of_image|>",
    "image_end_token_id": "<|end_of_image|>",
    "video_start_token_id": "<|begin_of_video|>",
    "video_end_token_id": "<|end_of_video|>",
    "image_token_id": "<|image|>",
    "video_token_id": "<|video|>",
}
TEMPLATE = (
    "{{- '[gMASK]<sop>' -}}{%- for m in messages -%}{{- '<|' ~ m.role ~ '|>\\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for p in m.content -%}"
    "{%- if p.type in ['image', 'image_url'] -%}"
    "{{- '<|begin_of_image|><|image|><|end_of_image|>' -}}"
    "{%- elif p.type in ['video', 'video_url'] -%}"
    "{{- '<|begin_of_video|><|video|><|end_of_video|>' -}}"
    "{%- else -%}{{- p.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)
SIZE = {"shortest_edge": 2 * 56 * 56, "longest_edge": 2 * 28 * 28 * 64}


def _fields(
    tokenizer: Any, options: Mapping[str, Any], vision: Mapping[str, Any], **fields: Any
) -> dict[str, Any]:
    """Returns keyword arguments of the configs; half of the channels of a head are rotated. vision:
    fields of the vision config that are not shared."""
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 2, 1],
    }
    text = text_config(tokenizer, options, rope_parameters=rope, **fields)
    shared = {"depth": 2, "hidden_size": 48, "num_heads": 4, "image_size": 84}
    return {
        "text_config": text,
        "vision_config": {**shared, "out_hidden_size": text["hidden_size"], **vision},
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        **token_ids(tokenizer, TOKENS),
    }


def _glm4v(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _fields(tokenizer, options, {"intermediate_size": 80})
    return transformers.Glm4vConfig(**fields)


def _glm46v(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _fields(tokenizer, options, {"intermediate_size": 80})
    for part, kind in (("text_config", "glm4v_text"), ("vision_config", "glm4v_vision")):
        fields[part]["model_type"] = kind
    return transformers.Glm46VConfig(**fields)


def _glm4v_moe(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = _fields(tokenizer, options, {"intermediate_size": 80}, head_dim=16, **EXPERTS)
    return transformers.Glm4vMoeConfig(**fields)


def _glm_ocr(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    # The size of a head is not hidden / heads.
    fields = _fields(tokenizer, options, {"intermediate_size": 80}, head_dim=32)
    fields["text_config"]["rope_parameters"]["mrope_section"] = [2, 3, 3]
    return transformers.GlmOcrConfig(**fields)


def _family(name: str, make_config: Any, processor: str = "Glm4v") -> Family:
    return Family(
        architecture=f"{name}ForConditionalGeneration",
        make_config=make_config,
        chat_template=TEMPLATE,
        eos_token="<|user|>",
        special_tokens=(*SPECIAL_TOKENS, *TOKENS.values()),
        # transformers writes a video as images, with the times between them.
        media=MediaForm(has_text_between=True, video_token="image"),
        files=preprocessor_files(
            processor, image={"size": SIZE}, video={"size": {**SIZE, "shortest_edge": 56 * 56}}
        ),
    )


GLM4V = _family("Glm4v", _glm4v)
GLM4V_MOE = _family("Glm4vMoe", _glm4v_moe)
GLM46V = _family("Glm46V", _glm46v, "Glm46V")
GLM_OCR = _family("GlmOcr", _glm_ocr, "Glm46V")
