"""A tiny checkpoint of MiniCPM-V 4.6."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import CHATML, Family, MediaForm, patch_size, tiles
from mmdeploy_llm_plugins.qwen.tiny35 import QWEN3_5_TEXT

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
    text = QWEN3_5_TEXT.make_config(tokenizer, options)
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


def _merge(config: Any) -> int:
    return 2 if config.downsample_mode == "4x" else 4


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the slices, each line by line, their patches side by side."""
    merge, patch = _merge(config), patch_size(config)
    found = [tile for span in media for tile in tiles(span.item, merge, patch)]
    strips = [F.unfold(tile[None], patch, stride=patch)[0] for tile in found]
    pixels = torch.cat(strips, 1).view(-1, patch, patch, sum(x.shape[1] for x in strips))
    return {
        "pixel_values": pixels.transpose(2, 3).flatten(2)[None],
        "target_sizes": torch.tensor([[side // patch for side in x.shape[1:]] for x in found]),
    }


MINICPMV4_6 = Family(
    architecture="MiniCPMV4_6ForConditionalGeneration",
    make_config=_minicpm,
    chat_template=CHATML.replace("<|vision_start|>", "").replace("<|vision_end|>", ""),
    special_tokens=tuple(TOKENS.values())[1:],
    named_tokens={**TOKENS, "video_token": "<|video_pad|>"},
    files={
        "preprocessor_config.json": {
            "image_processor_type": "MiniCPMV4_6ImageProcessor",
            **PIXELS,
        }
    },
    media=MediaForm(inputs=_inputs, merge_size=_merge, has_tiles=True, has_text_between=True),
)
