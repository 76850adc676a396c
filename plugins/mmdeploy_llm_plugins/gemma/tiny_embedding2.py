"""Tiny checkpoints of EmbeddingGemma 2, with texts alone and with Gemma 4's towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import transformers

from mmdeploy_llm.testing.tiny import Family, text_config

from .tiny4 import GEMMA4, TOKENS


def _text(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    """Returns three layers, the last without a window and with larger heads."""
    fields = text_config(
        tokenizer,
        options,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=32,
        sliding_window_pattern=3,
        sliding_window=3,
        hidden_size_per_layer_input=8,
        embedding_dim=40,
    )
    return transformers.EmbeddingGemma2TextConfig(**fields)


def _whole(tokenizer: Any, options: Mapping[str, Any]) -> Any:
    towers = GEMMA4.make_config(tokenizer, {})
    return transformers.EmbeddingGemma2Config(
        text_config=_text(tokenizer, options),
        vision_config=towers.vision_config,
        audio_config=towers.audio_config,
        **{name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()},
    )


EMBEDDING_GEMMA2_TEXT = Family(
    architecture="EmbeddingGemma2TextModel",
    make_config=_text,
    eos_token="</s>",
    is_embedder=True,
)
EMBEDDING_GEMMA2 = replace(
    GEMMA4,
    chat_template="",  # media stand in a prompt as they are
    architecture="EmbeddingGemma2Model",
    make_config=_whole,
    is_embedder=True,
)
