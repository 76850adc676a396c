"""A tiny checkpoint of PP-FormulaNet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm, picture_prompt

from .image import num_cells

SIDE = 128  # pixels


def _formulanet(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    ends = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
    }
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 16,
        "window_size": 3,
        "global_attn_indexes": [1],
        "mlp_dim": 48,
        "output_channels": 16,
        "post_conv_in_channels": 16,
        "post_conv_mid_channels": 24,
        "post_conv_out_channels": 32,
        "decoder_hidden_size": 64,
    }
    text = {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "decoder_layers": 3,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 80,
        "max_position_embeddings": 128,
        "forced_eos_token_id": None,
        **ends,
        **options,
    }
    return transformers.PPFormulaNetConfig(vision_config=vision, text_config=text, **ends)


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    (span,) = media
    return {"pixel_values": span.item.tensors["pixel_values"], "decoder_input_ids": ids}


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random beginning of an answer, and a random picture."""
    start, tokens = config.text_config.decoder_start_token_id, num_cells(config.vision_config)
    return picture_prompt(start, tokens, (SIDE, SIDE), seed)


FORMULANET = Family(
    architecture="PPFormulaNetForConditionalGeneration",
    make_config=_formulanet,
    eos_token="</s>",
    files={
        "preprocessor_config.json": {
            "image_processor_type": "PPFormulaNetImageProcessor",
            "do_align_long_axis": False,
            "do_crop_margin": True,
            "do_normalize": True,
            "do_pad": True,
            "do_rescale": True,
            "do_resize": True,
            "do_thumbnail": True,
            "image_mean": [0.7931, 0.7931, 0.7931],
            "image_std": [0.1738, 0.1738, 0.1738],
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": SIDE, "width": SIDE},
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
