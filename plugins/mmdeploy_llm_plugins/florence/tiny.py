"""A tiny checkpoint of Florence-2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm

SIDE = 64  # pixels
NUM_CELLS = 16  # of the last stage
LOCATIONS = tuple(f"<loc_{number}>" for number in range(8))  # published ones have 1,000


def _florence2(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    vision = {
        "depths": [1, 1, 1],
        "patch_size": [7, 3, 3],
        "patch_stride": [4, 2, 2],
        "patch_padding": [3, 1, 1],
        "patch_prenorm": [False, True, True],
        "embed_dim": [16, 32, 48],
        "num_heads": [2, 4, 4],
        "num_groups": [2, 4, 4],
        "window_size": 3,
        "projection_dim": 64,
        "max_position_embeddings": 20,
    }
    text = {
        "model_type": "bart",
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 80,
        "max_position_embeddings": 256,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
        "forced_bos_token_id": tokenizer.bos_token_id,
        **options,
    }
    return transformers.Florence2Config(
        vision_config=vision,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns what the encoder reads: placeholders of the picture, then the question."""
    (span,) = media
    question = span.item.tensors["input_ids"]
    places = torch.full((span.item.num_tokens - len(question),), config.image_token_id)
    return {
        "pixel_values": span.item.tensors["pixel_values"],
        "input_ids": torch.cat([places, question])[None],
        "decoder_input_ids": ids,
    }


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random beginning of an answer, and a picture with a random question."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (45 + seed,), generator=generator)
    pixels = torch.randn(1, 3, SIDE, SIDE, generator=generator)
    item = MediaInput(
        kind="image",
        tensors={"pixel_values": pixels, "input_ids": words[30:]},
        num_tokens=NUM_CELLS + 1 + len(words[30:]),
        key=f"florence-{seed}",
    )
    start = config.text_config.decoder_start_token_id
    return [start, *words[:30].tolist()], [MediaSpan(offset=0, item=item, rows=())]


FLORENCE2 = Family(
    architecture="Florence2ForConditionalGeneration",
    make_config=_florence2,
    eos_token="</s>",
    named_tokens={"image_token": "<image>"},
    special_tokens=("<image>", *LOCATIONS),
    files={
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "crop_size": {"height": SIDE, "width": SIDE},
            "do_center_crop": False,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.485, 0.456, 0.406],
            "image_std": [0.229, 0.224, 0.225],
            "image_seq_length": NUM_CELLS + 1,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "size": {"height": SIDE, "width": SIDE},
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
