"""A tiny checkpoint of Kosmos-2.5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm

from .image import PATCHES

PATCH, MOST, NUM_TOKENS = 4, 24, 6  # pixels along a side, patches and tokens of a picture
START, END = "<image>", "</image>"


def _kosmos(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = {
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 2048,
        "embed_dim": 64,
        "layers": 3,
        "ffn_dim": 80,
        "attention_heads": 4,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **options,
    }
    vision = {
        "hidden_size": 48,
        "patch_embed_hidden_size": 3 * PATCH**2,
        "intermediate_size": 80,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "max_num_patches": 2 * MOST,
    }
    return transformers.Kosmos2_5Config(
        text_config=text, vision_config=vision, latent_query_num=NUM_TOKENS
    )


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the patches, and which tokens are of a picture: 1, and -1 for those around it."""
    if not media:
        return {}
    mask = torch.zeros_like(ids)
    for span in media:
        end = span.offset + span.item.num_tokens
        mask[0, max(span.offset - 1, 0)], mask[0, end : end + 1] = -1, -1
        mask[0, span.offset : end] = 1
    patches = torch.cat([span.item.tensors[PATCHES] for span in media])
    return {PATCHES: patches, "image_embeds_position_mask": mask}


def _patches(seed: int) -> Tensor:
    """Returns random patches, after each other in rows of five; the last rows only fill up."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = 2 + seed % 3, 5
    places = torch.cartesian_prod(torch.arange(1.0, rows + 1), torch.arange(1.0, columns + 1))
    pixels = torch.randn(rows * columns, 3 * PATCH**2, generator=generator)
    filled = torch.cat([places, pixels], 1)
    return torch.nn.functional.pad(filled, (0, 0, 0, MOST - rows * columns))[None]


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns random text with a picture for each grid."""
    generator = torch.Generator().manual_seed(seed)

    def text(count: int) -> list[int]:
        ids: list[int] = torch.randint(40, VOCAB_SIZE, (count,), generator=generator).tolist()
        return ids

    ids, media = text(9), []
    for index in range(len(grids)):
        own = 100 * seed + index
        item = MediaInput(
            kind="image",
            tensors={PATCHES: _patches(own)},
            num_tokens=NUM_TOKENS,
            key=f"patches-{own}",
        )
        media.append(MediaSpan(offset=len(ids) + 1, item=item, rows=None))
        ids += [38, *[config.text_config.bos_token_id] * NUM_TOKENS, 39, *text(4)]
    return ids + text(12), media


KOSMOS2_5 = Family(
    architecture="Kosmos2_5ForConditionalGeneration",
    make_config=_kosmos,
    eos_token="</s>",
    special_tokens=(START, END, "<ocr>", "<md>"),
    named_tokens={"image_token": "<s>", "boi_token": START, "eoi_token": END},
    files={
        "preprocessor_config.json": {
            "image_processor_type": "Kosmos2_5ImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": True,
            "max_patches": MOST,
            "patch_size": {"height": PATCH, "width": PATCH},
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
