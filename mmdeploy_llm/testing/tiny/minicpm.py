"""A tiny checkpoint of MiniCPM-V 4.6."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from .common import Family
from .qwen import TEMPLATE
from .qwen35 import FAMILIES as TEXT_FAMILIES

# The tokens of an image, under their names in tokenizer_config.json.
TOKENS = {
    "image_token": "<|image_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
PIXELS = {"patch_size": 14, "scale_resolution": 112, "max_slice_nums": 6}


def _minicpm(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = TEXT_FAMILIES["qwen3_5_text"].make_config(tokenizer, options)
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 98,
        "patch_size": 14,
    }
    return transformers.MiniCPMV4_6Config(
        text_config=text,
        vision_config=vision,
        insert_layer_id=1,
        image_token_id=tokenizer.convert_tokens_to_ids("<|image_pad|>"),
        video_token_id=tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        tie_word_embeddings=text.tie_word_embeddings,
    )


FAMILIES: Mapping[str, Family] = {
    "minicpmv4_6": Family(
        architecture="MiniCPMV4_6ForConditionalGeneration",
        make_config=_minicpm,
        chat_template=TEMPLATE.replace("<|vision_start|>", "").replace("<|vision_end|>", ""),
        eos_token="<|im_end|>",
        special_tokens=tuple(TOKENS.values())[1:],
        files={
            "preprocessor_config.json": {
                "image_processor_type": "MiniCPMV4_6ImageProcessor",
                **PIXELS,
            }
        },
    ),
}
