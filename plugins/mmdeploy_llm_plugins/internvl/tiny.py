"""A tiny checkpoint of InternVL 3.5, whose text model is Qwen3."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import (
    CHATML,
    IMAGE_MEAN,
    IMAGE_STD,
    Family,
    MediaForm,
    patch_size,
    text_config,
    tiles,
)

IMAGE, START, END, VIDEO = "<IMG_CONTEXT>", "<img>", "</img>", "<video>"
SIDE = 56  # pixels of a tile: 4 x 4 patches, 4 tokens
TEMPLATE = CHATML.replace("<|vision_start|>", "").replace("<|vision_end|>", "\\n")
TEMPLATE = TEMPLATE.replace("<|image_pad|>", IMAGE).replace("<|video_pad|>", VIDEO)


def _internvl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields: dict[str, Any] = {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": False}
    text = text_config(tokenizer, options, **fields)
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "attention_bias": True,
        "image_size": SIDE,
        "patch_size": 14,
    }
    return transformers.InternVLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=4,
        tie_word_embeddings=text["tie_word_embeddings"],
    )


def _merge(config: Any) -> int:
    return round(1 / float(config.downsample_ratio))


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns all tiles, one after another."""
    merge, patch = _merge(config), patch_size(config)
    return {"pixel_values": torch.cat([tiles(span.item, merge, patch) for span in media])}


INTERNVL = Family(
    architecture="InternVLForConditionalGeneration",
    make_config=_internvl,
    chat_template=TEMPLATE,
    special_tokens=(IMAGE, START, END, VIDEO),
    named_tokens={
        "context_image_token": IMAGE,
        "end_image_token": END,
        "start_image_token": START,
        "video_token": VIDEO,
    },
    files={
        "preprocessor_config.json": {
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            "max_patches": 6,
            "image_mean": IMAGE_MEAN,
            "image_std": IMAGE_STD,
        },
        "processor_config.json": {"processor_class": "InternVLProcessor", "image_seq_length": 4},
    },
    media=MediaForm(inputs=_inputs, merge_size=_merge, has_tiles=True),
)
