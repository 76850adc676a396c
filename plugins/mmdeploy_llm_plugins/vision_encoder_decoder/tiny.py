"""Tiny checkpoints of TrOCR, and of Donut, which has another tower and another decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm, picture_prompt

from .image import num_cells

SIDE = 32  # pixels
TASK = "<s_task>"


def _decoder(tokenizer: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "decoder_layers": 3,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 80,
        "max_position_embeddings": 128,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
        "is_decoder": True,
        "add_cross_attention": True,
        "scale_embedding": True,
        **options,
    }


def _whole(tower: Any, decoder: Any) -> Any:
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(tower, decoder)
    for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(decoder, name))
    return config


def _trocr(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    tower = transformers.ViTConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=80,
        image_size=SIDE,
        patch_size=8,
    )
    fields = {"cross_attention_hidden_size": 48, "activation_function": "relu"}
    return _whole(tower, transformers.TrOCRConfig(**_decoder(tokenizer, {**fields, **options})))


def _donut(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    tower = transformers.DonutSwinConfig(
        image_size=[SIDE, 2 * SIDE],
        patch_size=4,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
    )
    return _whole(tower, transformers.MBartConfig(**_decoder(tokenizer, options)))


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    (span,) = media
    return {"pixel_values": span.item.tensors["pixel_values"], "decoder_input_ids": ids}


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int, *, width: int = SIDE
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random beginning of an answer, and a random picture."""
    start, tokens = config.decoder_start_token_id, num_cells(config.encoder)
    return picture_prompt(start, tokens, (SIDE, width), seed)


SHARED = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 1 / 255,
}
TROCR = Family(
    architecture="VisionEncoderDecoderModel",
    make_config=_trocr,
    eos_token="</s>",
    files={
        "preprocessor_config.json": {
            **SHARED,
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
DONUT = Family(
    architecture="VisionEncoderDecoderModel",
    make_config=_donut,
    eos_token="</s>",
    special_tokens=(TASK,),
    files={
        "preprocessor_config.json": {
            **SHARED,
            "do_align_long_axis": False,
            "do_pad": True,
            "do_thumbnail": True,
            "image_processor_type": "DonutImageProcessor",
            "size": {"height": SIDE, "width": 2 * SIDE},
        }
    },
    media=MediaForm(inputs=_inputs, prompt=partial(_prompt, width=2 * SIDE)),
)
