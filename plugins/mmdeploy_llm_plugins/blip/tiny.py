"""A tiny checkpoint of BLIP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm, picture_prompt

from .image import num_cells

SIDE = 32  # pixels


def _blip(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "sep_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **options,
    }
    vision = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": 8,
    }
    tied = text["tie_word_embeddings"] = options.get("tie_word_embeddings", True)
    return transformers.BlipConfig(text_config=text, vision_config=vision, tie_word_embeddings=tied)


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    (span,) = media
    return {"pixel_values": span.item.tensors["pixel_values"], "input_ids": ids}


def _generate(model: Any, inputs: dict[str, Tensor], options: dict[str, Any]) -> Tensor:
    """Calls the decoder as BLIP's own generate does, which leaves out the last token of a prompt
    and ends at one of its own."""
    own = dict(inputs)
    cells = model.vision_model(pixel_values=own.pop("pixel_values")).last_hidden_state
    mask = torch.ones(cells.shape[:-1], dtype=torch.long)
    seen = {"encoder_hidden_states": cells, "encoder_attention_mask": mask}
    out: Tensor = model.text_decoder.generate(**own, **seen, **options)
    return out


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random beginning of a caption, and a random picture."""
    start, tokens = config.text_config.bos_token_id, num_cells(config.vision_config)
    return picture_prompt(start, tokens, (SIDE, SIDE), seed)


BLIP = Family(
    architecture="BlipForConditionalGeneration",
    make_config=_blip,
    eos_token="</s>",
    files={
        "preprocessor_config.json": {
            "image_processor_type": "BlipImageProcessor",
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": SIDE, "width": SIDE},
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt, generate=_generate),
)
