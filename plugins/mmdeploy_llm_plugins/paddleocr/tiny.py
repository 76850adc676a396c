"""A tiny checkpoint of PaddleOCR-VL."""

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
    token_ids,
)

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
    "image_token_id": "<|IMAGE_PLACEHOLDER|>",
    "video_token_id": "<|VIDEO_PLACEHOLDER|>",
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


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Puts patches row by row instead of block by block of merged patches, each a picture."""
    inputs = grid_inputs(config, ids, media)
    patch, merge = config.vision_config.patch_size, config.vision_config.spatial_merge_size
    rows = []
    for item in (span.item for span in media):
        _, height, width = item.grid_thw or (1, 1, 1)
        blocks = item.tensors["pixels"].view(height // merge, width // merge, merge, merge, -1)
        rows.append(blocks.transpose(1, 2).reshape(height * width, -1, patch, patch))
    return {**inputs, "pixel_values": torch.cat(rows)}


PADDLEOCR_VL = Family(
    architecture="PaddleOCRVLForConditionalGeneration",
    make_config=_paddleocr_vl,
    chat_template=TEMPLATE,
    eos_token="</s>",
    named_tokens={name.removesuffix("_id"): text for name, text in TOKENS.items()},
    files=_files(),
    media=MediaForm(inputs=_inputs),
)
