"""Tiny checkpoints of LFM2, LFM2-MoE and LFM2-VL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import CHATML, Family, MediaForm, lines, text_family

IMAGE = "<image>"
KINDS = ["conv", "full_attention", "conv", "full_attention"]
VL_TEMPLATE = CHATML.replace("<|vision_start|><|image_pad|><|vision_end|>", IMAGE)


LFM2 = text_family("Lfm2ForCausalLM", num_hidden_layers=4, layer_types=KINDS, block_multiple_of=16)
LFM2_MOE = text_family(
    "Lfm2MoeForCausalLM",
    num_hidden_layers=4,
    layer_types=KINDS,
    num_dense_layers=1,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    routed_scaling_factor=1.5,
)


def _lfm2_vl(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = LFM2.make_config(tokenizer, options).to_dict()
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


def _merge(config: Any) -> int:
    return int(config.downsample_factor)


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the tiles, all padded to the largest: line by line, channels last."""
    patches: list[Tensor] = []
    sizes: list[list[int]] = []
    for item in (span.item for span in media):
        pixels = item.tensors["pixels"]
        grids = [item.grid_thw or (1, 1, 1)]
        if "thumbnail" in item.tensors:
            grids.append((1, *item.tensors["thumbnail"].tolist()))
        for frames, height, width in grids:
            count = frames * height * width
            own, pixels = pixels[:count], pixels[count:]
            part = replace(item, tensors={"pixels": own}, grid_thw=(frames, height, width))
            patches += lines(part, _merge(config))[0]
            sizes += [[height, width]] * frames
    longest = max(map(len, patches))
    counts = torch.tensor([len(tile) for tile in patches])
    return {
        "pixel_values": torch.stack([F.pad(x, (0, 0, 0, longest - len(x))) for x in patches]),
        "pixel_attention_mask": (torch.arange(longest) < counts[:, None]).int(),
        "spatial_shapes": torch.tensor(sizes),
    }


LFM2_VL = Family(
    architecture="Lfm2VlForConditionalGeneration",
    make_config=_lfm2_vl,
    chat_template=VL_TEMPLATE,
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
    media=MediaForm(inputs=_inputs, merge_size=_merge, has_tiles=True),
)
