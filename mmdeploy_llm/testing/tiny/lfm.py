"""Tiny checkpoints of LFM2, LFM2-MoE and LFM2-VL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import transformers

from .common import Family, text_config
from .qwen import TEMPLATE

IMAGE = "<image>"
VL_TEMPLATE = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", IMAGE)


def _lfm2(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = text_config(
        tokenizer,
        options,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        block_multiple_of=16,
    )
    return transformers.Lfm2Config(**fields)


def _lfm2_moe(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    fields = text_config(
        tokenizer,
        options,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        routed_scaling_factor=1.5,
    )
    return transformers.Lfm2MoeConfig(**fields)


def _lfm2_vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = _lfm2(tokenizer, options).to_dict()
    vision = {
        "model_type": "siglip2_vision_model",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "patch_size": 8,
        "num_patches": 36,
        "vision_use_head": False,
    }
    return transformers.Lfm2VlConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        projector_hidden_size=40,
        tie_word_embeddings=text["tie_word_embeddings"],
    )


FAMILIES: Mapping[str, Family] = {
    "lfm2": Family(
        architecture="Lfm2ForCausalLM",
        make_config=_lfm2,
        chat_template=TEMPLATE,
        eos_token="<|im_end|>",
    ),
    "lfm2_moe": Family(
        architecture="Lfm2MoeForCausalLM",
        make_config=_lfm2_moe,
        chat_template=TEMPLATE,
        eos_token="<|im_end|>",
    ),
    "lfm2_vl": Family(
        architecture="Lfm2VlForConditionalGeneration",
        make_config=_lfm2_vl,
        chat_template=VL_TEMPLATE,
        eos_token="<|im_end|>",
        special_tokens=(IMAGE, "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"),
        files={
            "preprocessor_config.json": {
                "image_processor_type": "Lfm2VlImageProcessor",
                "encoder_patch_size": 8,
                "tile_size": 32,
                "min_image_tokens": 2,
                "max_image_tokens": 8,
                "max_tiles": 6,
            }
        },
    ),
}
