"""A tiny checkpoint of Gemma 3 with images."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import Family, MediaForm, media_kinds, patch_size, tiles

from .tiny import GEMMA3_TEXT

TOKEN, START, END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
SIDE = 56  # pixels of an image: 4 x 4 patches, 4 tokens
TEMPLATE = (
    "{{- bos_token -}}{%- for m in messages -%}{{- '<start_of_turn>' ~ m.role ~ '\\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for part in m.content -%}"
    "{%- if part.type == 'image' -%}{{- '" + START + "' -}}{%- else -%}{{- part.text -}}"
    "{%- endif -%}{%- endfor -%}{%- endif -%}{{- '<end_of_turn>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"
)


def _gemma3(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = GEMMA3_TEXT.make_config(tokenizer, options)
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": 14,
    }
    return transformers.Gemma3Config(
        text_config=text,
        vision_config=transformers.SiglipVisionConfig(**vision),
        mm_tokens_per_image=4,
        image_token_index=tokenizer.convert_tokens_to_ids(TOKEN),
        boi_token_index=tokenizer.convert_tokens_to_ids(START),
        eoi_token_index=tokenizer.convert_tokens_to_ids(END),
        tie_word_embeddings=text.tie_word_embeddings,
    )


def _merge(config: Any) -> int:
    vision = config.vision_config
    return int(vision.image_size // vision.patch_size // math.isqrt(config.mm_tokens_per_image))


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns all crops, one after another, and the kind of each token."""
    merge, patch = _merge(config), patch_size(config)
    pixels = torch.cat([tiles(span.item, merge, patch) for span in media])
    return {"pixel_values": pixels, "token_type_ids": media_kinds(ids, media)}


GEMMA3 = Family(
    architecture="Gemma3ForConditionalGeneration",
    make_config=_gemma3,
    chat_template=TEMPLATE,
    eos_token="</s>",
    special_tokens=(TOKEN, START, END),
    named_tokens={"boi_token": START, "eoi_token": END, "image_token": TOKEN},
    files={
        "preprocessor_config.json": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "resample": 2,
        },
        "processor_config.json": {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    },
    media=MediaForm(inputs=_inputs, merge_size=_merge, has_tiles=True, has_text_between=True),
)
