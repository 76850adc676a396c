"""Tiny checkpoints of ERNIE 4.5: dense, mixture of experts, vision-language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import (
    Family,
    MediaForm,
    grid_inputs,
    preprocessor_files,
    text_config,
    text_family,
    token_ids,
)

TOKENS = {
    "image_start_token_id": "<|IMAGE_START|>",
    "image_token_id": "<|IMAGE_PLACEHOLDER|>",
    "image_end_token_id": "<|IMAGE_END|>",
    "video_start_token_id": "<|VIDEO_START|>",
    "video_token_id": "<|VIDEO_PLACEHOLDER|>",
    "video_end_token_id": "<|VIDEO_END|>",
}
TEMPLATE = (
    "{{- '<|begin_of_sentence|>' -}}{%- set n = namespace(image=0, video=0) -%}"
    "{%- for m in messages -%}"
    "{{- {'system': '', 'user': 'User: ', 'assistant': 'Assistant: '}[m.role] -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for p in m.content -%}"
    "{%- if p.type in ['image', 'image_url'] -%}{%- set n.image = n.image + 1 -%}"
    "{{- 'Picture ' ~ n.image ~ ':<|IMAGE_START|><|image@placeholder|><|IMAGE_END|>' -}}"
    "{%- elif p.type in ['video', 'video_url'] -%}{%- set n.video = n.video + 1 -%}"
    "{{- 'Video ' ~ n.video ~ ':<|VIDEO_START|><|video@placeholder|><|VIDEO_END|>' -}}"
    "{%- else -%}{{- p.text -}}{%- endif -%}{%- endfor -%}{%- endif -%}"
    "{{- '<|end_of_sentence|>' if m.role == 'assistant' else '\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'Assistant: <think>' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '</think>' -}}{%- endif -%}"
    "{%- endif -%}"
)


def _ernie_vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [5, 5, 6]}
    text = text_config(
        tokenizer,
        options,
        hidden_size=96,
        num_attention_heads=3,
        num_key_value_heads=1,
        rope_parameters=rope,
        moe_intermediate_size=[32, 16],
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
        tie_word_embeddings=True,
    )
    vision = {"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128}
    return transformers.Ernie4_5_VLMoeConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=text["tie_word_embeddings"],
        **token_ids(tokenizer, TOKENS),
    )


ERNIE4_5 = text_family(
    "Ernie4_5ForCausalLM",
    chat_template=TEMPLATE,
    eos_token="</s>",
    num_attention_heads=6,
    head_dim=16,
    tie_word_embeddings=True,
)
ERNIE4_5_MOE = text_family(
    "Ernie4_5_MoeForCausalLM",
    chat_template=TEMPLATE,
    eos_token="</s>",
    tie_word_embeddings=True,
    moe_intermediate_size=32,
    moe_num_experts=6,
    moe_k=2,
    moe_num_shared_experts=2,
)


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Adds the modality of each token, markers included: 1 in an image, 2 in a video, 0 in text."""
    kinds = torch.zeros_like(ids)
    for number, kind in ((1, "image"), (2, "video")):
        for suffix in ("", "_start", "_end"):
            kinds[ids == getattr(config, f"{kind}{suffix}_token_id")] = number
    return {**grid_inputs(config, ids, media), "moe_mm_token_type_ids": kinds}


ERNIE4_5_VL_MOE = Family(
    architecture="Ernie4_5_VLMoeForConditionalGeneration",
    make_config=_ernie_vl,
    chat_template=TEMPLATE,
    eos_token="</s>",
    named_tokens={name.removesuffix("_id"): text for name, text in TOKENS.items()},
    files=preprocessor_files("Ernie4_5_VLMoe", image={"temporal_patch_size": 1}),
    media=MediaForm(inputs=_inputs),
)
