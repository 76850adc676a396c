"""Qwen3.5 (also published as 3.6 and 3.8), dense and with experts: text models, and models with
images and videos. The tower is Qwen3-VL's without features for inner layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmdeploy_llm.layers import CausalLM, GridLM, rotary_config
from mmdeploy_llm.weights.map import WeightMap

from .draft import KEYS
from .hybrid import hybrid_decoder, layer_cache, new_layer
from .text import IGNORED
from .text import RENAMES as TEXT_RENAMES
from .tower3 import DeepstackTower
from .vl3 import RENAMES as VL_RENAMES
from .vl3 import SECTIONS, Qwen3VLForConditionalGeneration, interleaved_axes

# Draft layers, which are used on demand.
NOT_NEEDED = (*IGNORED, KEYS)


class Qwen35ForCausalLM(CausalLM):
    """transformers' Qwen3_5ForCausalLM and Qwen3_5MoeForCausalLM."""

    def __init__(self, config: Any, *, is_tied: bool | None = None) -> None:
        """config: the text config. is_tied: None: as it says."""
        is_tied = config.tie_word_embeddings if is_tied is None else is_tied
        decoder = hybrid_decoder(config, rotary_config(config), is_tied=is_tied)
        super().__init__(decoder, new_layer(config))
        self.cache = layer_cache(decoder, config)
        ignored = (*NOT_NEEDED, "^lm_head") if decoder.is_tied else NOT_NEEDED
        self.weight_map = WeightMap(self, renames=TEXT_RENAMES, ignored=ignored)


class Qwen35ForConditionalGeneration(Qwen3VLForConditionalGeneration):
    """transformers' Qwen3_5ForConditionalGeneration and Qwen3_5MoeForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        text = config.text_config
        sections = text.rope_parameters.get("mrope_section", SECTIONS)
        rotary = rotary_config(text)
        axes = interleaved_axes(sections, (rotary.rotary_dim or rotary.head_dim) // 2)
        decoder = hybrid_decoder(
            text, replace(rotary, axes=axes), is_tied=config.tie_word_embeddings
        )
        merge_size = config.vision_config.spatial_merge_size
        GridLM.__init__(self, decoder, new_layer(text), merge_size=merge_size)
        self.cache = layer_cache(decoder, text)
        self.visual = DeepstackTower(config.vision_config)
        ignored = (*NOT_NEEDED, "^lm_head") if decoder.is_tied else NOT_NEEDED
        self.weight_map = WeightMap(self, renames=(*VL_RENAMES, *TEXT_RENAMES), ignored=ignored)
