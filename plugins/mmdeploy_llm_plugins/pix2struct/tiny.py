"""A tiny checkpoint of Pix2Struct."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import pad

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm

PATCH, MOST = 4, 24  # pixels along a side, patches of a picture


def _pix2struct(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "d_kv": 16,
        "d_ff": 80,
        "num_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 20,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "decoder_start_token_id": tokenizer.pad_token_id,
        **options,
    }
    vision = {
        "hidden_size": 64,  # that of the decoder, whose layers read it as it is
        "patch_embed_hidden_size": 3 * PATCH**2,
        "d_ff": 80,
        "d_kv": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "seq_len": 2 * MOST,
    }
    return transformers.Pix2StructConfig(text_config=text, vision_config=vision)


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    (span,) = media
    patches = span.item.tensors["flattened_patches"]
    seen = (patches.sum(-1) != 0).float()
    return {"flattened_patches": patches, "attention_mask": seen, "decoder_input_ids": ids}


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns a random beginning of an answer, and random patches."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (30,), generator=generator)
    rows, columns = 2 + seed % 3, 5
    places = torch.cartesian_prod(torch.arange(1.0, rows + 1), torch.arange(1.0, columns + 1))
    pixels = torch.randn(rows * columns, 3 * PATCH**2, generator=generator)
    item = MediaInput(
        kind="image",
        tensors={"flattened_patches": pad(torch.cat([places, pixels], 1), (0, 0, 0, 3))[None]},
        num_tokens=rows * columns,
        key=f"patches-{seed}",
    )
    start = config.text_config.decoder_start_token_id
    return [start, *words.tolist()], [MediaSpan(offset=0, item=item, rows=())]


PIX2STRUCT = Family(
    architecture="Pix2StructForConditionalGeneration",
    make_config=_pix2struct,
    eos_token="</s>",
    files={
        "preprocessor_config.json": {
            "image_processor_type": "Pix2StructImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": True,
            "is_vqa": False,
            "max_patches": MOST,
            "patch_size": {"height": PATCH, "width": PATCH},
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
