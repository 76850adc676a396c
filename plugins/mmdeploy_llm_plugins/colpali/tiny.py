"""Tiny checkpoints of models with a vector for each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.neomme.processing_neomme import NeoMMEProcessor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.testing.tiny import Family, MediaForm, preprocessor_files, text_config
from mmdeploy_llm_plugins.bert.tiny import BERT_FRAMES, MODERNBERT, ULTRABERT
from mmdeploy_llm_plugins.qwen.tiny_vl import QWEN2_VL

SIDE, PATCH, DIM = 56, 14, 24
HALF = [0.5, 0.5, 0.5]
# Their processors take texts or images, not both as the kit gives them: it compares the pixels, and
# the tests of this folder the texts.
NO_PROCESSOR = {"processor_config.json": {"processor_class": "none"}}
VISION: Mapping[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
    "vision_use_head": False,
}
PALI_TOKENS = ("<image>", "<bos>")
MODERN_TOKENS = (
    "<image>",
    "<fake_token_around_image>",
    "<end_of_utterance>",
    "<global-img>",
    "<|begin_of_text|>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)),
)


def _colpali(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    text = text_config(tokenizer, options, model_type="gemma", head_dim=16)
    vlm = transformers.PaliGemmaConfig(
        text_config=text,
        vision_config={**VISION, "projection_dim": text["hidden_size"]},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        projection_dim=text["hidden_size"],
        hidden_size=text["hidden_size"],
    )
    return transformers.ColPaliConfig(vlm_config=vlm, embedding_dim=DIM)


def _colqwen2(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    vlm = QWEN2_VL.make_config(tokenizer, options)
    return transformers.ColQwen2Config(vlm_config=vlm, embedding_dim=DIM)


def _colmodernvbert(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    vlm = transformers.ModernVBertConfig(
        text_config=MODERNBERT.make_config(tokenizer, options),
        vision_config=dict(VISION),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pixel_shuffle_factor=2,
    )
    return transformers.ColModernVBertConfig(vlm_config=vlm, embedding_dim=DIM)


def _ultravbert(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    return transformers.UltraVBertConfig(
        text_config=ULTRABERT.make_config(tokenizer, options),
        vision_config=dict(VISION),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pixel_shuffle_factor=2,
    )


def _neomme(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    """Layers with a narrow and a wide window, and without one."""
    kinds = ["sliding_attention", "full_attention", *["sliding_attention"] * 2, "full_attention"]
    fields = {
        "vocab_size": len(tokenizer),
        "embedding_rank": 24,
        "hidden_size": 64,
        "intermediate_size": 80,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": kinds,
        "sliding_window": 3,
        "patch_size": PATCH,
        "embedding_dim": DIM,
        "pad_token_id": tokenizer.pad_token_id,
        "document_token_id": tokenizer.convert_tokens_to_ids("<doc>"),
        "image_token_id": tokenizer.convert_tokens_to_ids("<img>"),
    }
    return transformers.NeoMMEConfig(**{**fields, **options})


def _pages(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the patches of a picture, and their places."""
    if not media:
        return {}
    (span,) = media
    assert span.item.grid_thw is not None
    places = NeoMMEProcessor._image_positions(*span.item.grid_thw[1:])
    return {"pixel_values": span.item.tensors["pixel_values"], "position_ids": places.T[:, None]}


def _pixels(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the images, and that all tokens see each other."""
    pixels = torch.cat([span.item.tensors["pixel_values"] for span in media])
    return {"pixel_values": pixels, "token_type_ids": torch.zeros_like(ids)}


def _tiles(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns the tiles of all images."""
    return {"pixel_values": torch.cat([span.item.tensors["pixel_values"] for span in media], 1)}


def _grids(config: Any, ids: Tensor, media: Sequence[MediaSpan]) -> dict[str, Tensor]:
    """Returns patches and grids of an image."""
    (span,) = media
    grid = torch.tensor([span.item.grid_thw])
    return {"pixel_values": span.item.tensors["pixels"][None], "image_grid_thw": grid}


NEOMME = Family(
    architecture="NeoMMEForRetrieval",
    make_config=_neomme,
    chat_template=(
        "{{- '<query>' if task == 'query' else '<doc>' -}}"
        "{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
        "{%- if task == 'query' -%}<mask><mask><mask>{%- endif -%}"
    ),
    special_tokens=("<doc>", "<img>", "<row>", "<query>", "<mask>"),
    named_tokens={"document_token": "<doc>", "image_token": "<img>", "row_token": "<row>"},
    is_embedder=True,
    files={
        **NO_PROCESSOR,
        "preprocessor_config.json": {
            "image_processor_type": "NeoMMEImageProcessor",
            "patch_size": PATCH,
            "max_side": 4 * PATCH,
            "image_mean": HALF,
            "image_std": HALF,
        },
    },
    media=MediaForm(inputs=_pages),
)
COLPALI = Family(
    architecture="ColPaliForRetrieval",
    make_config=_colpali,
    eos_token="</s>",
    special_tokens=PALI_TOKENS,
    is_embedder=True,
    files={
        **NO_PROCESSOR,
        "preprocessor_config.json": {
            "image_processor_type": "SiglipImageProcessor",
            "size": {"height": SIDE, "width": SIDE},
            "image_seq_length": 16,
            "image_mean": HALF,
            "image_std": HALF,
            "resample": 3,
        },
    },
    media=MediaForm(inputs=_pixels),
)
COLQWEN2 = Family(
    architecture="ColQwen2ForRetrieval",
    make_config=_colqwen2,
    special_tokens=("<|endoftext|>",),
    is_embedder=True,
    files={**preprocessor_files("Qwen2VL"), **NO_PROCESSOR},
    media=MediaForm(inputs=_grids),
)
COLMODERNVBERT = Family(
    architecture="ColModernVBertForRetrieval",
    make_config=_colmodernvbert,
    eos_token="</s>",
    special_tokens=MODERN_TOKENS,
    frames=BERT_FRAMES,
    is_embedder=True,
    files={
        **NO_PROCESSOR,
        "preprocessor_config.json": {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 3 * SIDE},
            "max_image_size": {"longest_edge": SIDE},
            "image_mean": HALF,
            "image_std": HALF,
            "resample": 1,
            "do_image_splitting": True,
        },
    },
    media=MediaForm(inputs=_tiles),
)
ULTRAVBERT = replace(
    COLMODERNVBERT,
    architecture="UltraVBertModel",
    make_config=_ultravbert,
    files={
        **NO_PROCESSOR,
        "preprocessor_config.json": {
            **COLMODERNVBERT.files["preprocessor_config.json"],
            "image_processor_type": "UltraVBertImageProcessor",
            "max_image_tiles": 4,
        },
    },
)
