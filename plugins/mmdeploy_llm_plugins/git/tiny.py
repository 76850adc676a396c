"""A tiny checkpoint of GIT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm, picture_prompt

from .image import num_cells

SIDE, PATCH = 32, 8  # pixels


def _git(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 80,
        "max_position_embeddings": 128,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **options,
    }
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
    }
    return transformers.GitConfig(vision_config=vision, **text)


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Any]:
    """Returns the pixels, and that the logits are those of the text."""
    (span,) = media
    return {"pixel_values": span.item.tensors["pixel_values"], "logits_to_keep": ids.shape[1]}


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random text, and a random picture where there is a grid."""
    tokens = num_cells(config.vision_config)
    ids, media = picture_prompt(config.bos_token_id, tokens, (SIDE, SIDE), seed)
    return ids, media if grids else []


GIT = Family(
    architecture="GitForCausalLM",
    make_config=_git,
    eos_token="</s>",
    files={
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "crop_size": {"height": SIDE, "width": SIDE},
            "do_center_crop": True,
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"shortest_edge": SIDE},
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
