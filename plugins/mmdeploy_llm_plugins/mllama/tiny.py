"""A tiny checkpoint of Llama 3.2 Vision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.mllama.processing_mllama import (
    convert_sparse_cross_attention_mask_to_dense,
    get_cross_attention_token_mask,
)

from mmdeploy_llm.hooks import MediaInput, MediaSpan, MediaView
from mmdeploy_llm.testing.tiny import VOCAB_SIZE, Family, MediaForm, text_config

from .image import TOKEN, tile_tokens

SIDE, NUM_TILES = 28, 4  # pixels of a tile, tiles of a picture
TEMPLATE = (
    "{{- '<s>' -}}{%- for m in messages -%}{{- '<|im_start|>' ~ m.role ~ '\\n' -}}"
    "{%- if m.content is string -%}{{- m.content -}}{%- else -%}{%- for p in m.content -%}"
    "{%- if p.type == 'image' -%}{{- '<|image|>' -}}{%- else -%}{{- p.text -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def _mllama(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    own = {"num_hidden_layers": 5, "cross_attention_layers": [1, 3], "tie_word_embeddings": False}
    text = text_config(tokenizer, {**own, **options})
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_global_layers": 1,
        "attention_heads": 2,
        "intermediate_size": 48,
        "image_size": SIDE,
        "patch_size": 14,
        "max_num_tiles": NUM_TILES,
        "intermediate_layers_indices": [0, 2],
        "vision_output_dim": 96,
    }
    return transformers.MllamaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(TOKEN),
    )


def _inputs(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    names = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    found = {name: torch.cat([span.item.tensors[name] for span in media], 1) for name in names}
    own = ids[0].tolist()
    mask = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(own, config.image_token_index)],
        [found["aspect_ratio_mask"][0].sum(-1).tolist()],
        NUM_TILES,
        len(own),
    )
    return {**found, "cross_attention_mask": torch.from_numpy(mask)}


def _picture(config: Any, seed: int) -> MediaInput:
    """Returns a random picture of one to four tiles."""
    generator, count = torch.Generator().manual_seed(seed), 1 + seed % NUM_TILES
    pixels = torch.randn(1, 1, NUM_TILES, 3, SIDE, SIDE, generator=generator)
    pixels[:, :, count:] = 0
    ratio = config.vision_config.supported_aspect_ratios.index([1, count]) + 1
    return MediaInput(
        kind="image",
        tensors={
            "pixel_values": pixels,
            "aspect_ratio_ids": torch.tensor([[ratio]]),
            "aspect_ratio_mask": (torch.arange(NUM_TILES) < count).long()[None, None],
        },
        num_tokens=NUM_TILES * tile_tokens(config.vision_config),
        key=f"mllama-{seed}",
    )


def _prompt(
    config: Any, grids: Sequence[tuple[int, int, int]], seed: int
) -> tuple[list[int], list[MediaSpan]]:
    """Returns random tokens with a picture for each grid: after some of them, then after others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (5,), generator=generator).tolist()
    places = []
    for _ in grids:
        places.append(len(ids))
        words = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (13,), generator=generator)
        ids += [config.image_token_index, *words.tolist()]
    spans = []
    for number, (place, end) in enumerate(zip(places, [*places[1:], None], strict=False)):
        item = _picture(config, seed + number)
        seen = int(item.tensors["aspect_ratio_mask"].sum()) * tile_tokens(config.vision_config)
        view = MediaView(first=place, end=end, num_tokens=seen)
        spans.append(MediaSpan(offset=0, item=item, rows=(), view=view))
    words = torch.randint(VOCAB_SIZE // 10, VOCAB_SIZE, (20,), generator=generator)
    return [*ids, *words.tolist()], spans


MLLAMA = Family(
    architecture="MllamaForConditionalGeneration",
    make_config=_mllama,
    chat_template=TEMPLATE,
    last_tokens=(TOKEN,),
    named_tokens={"image_token": TOKEN},
    frames=("<s> $A", "<s> $A $B"),
    files={
        "preprocessor_config.json": {
            "image_processor_type": "MllamaImageProcessor",
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_pad": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "max_image_tiles": NUM_TILES,
            "resample": 2,
            "rescale_factor": 1 / 255,
            "size": {"height": SIDE, "width": SIDE},
        }
    },
    media=MediaForm(inputs=_inputs, prompt=_prompt),
)
