"""Qwen2-VL and Qwen2.5-VL: the Qwen2 decoder with M-RoPE, each with its vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.layers import DecoderConfig, Grid, GridLM, sectioned_axes
from mmdeploy_llm.weights.map import WeightMap

from .text import IGNORED, decoder_config
from .tower import FrameTower, WindowTower

# From the published names, and from those of transformers' modules, to ours.
RENAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.visual\.", "visual."),
    (r"^visual\.merger\.mlp\.0\.", "visual.merger.mlp.fc1."),
    (r"^visual\.merger\.mlp\.2\.", "visual.merger.mlp.fc2."),
)
SECTIONS = (16, 24, 24)  # transformers' default: channel pairs of time, height and width


class QwenVL(GridLM):
    """The model of both families. tower: encodes pixels and grids to tokens."""

    def __init__(self, config: Any, tower: FrameTower | WindowTower) -> None:
        decoder = _decoder_config(config)
        super().__init__(decoder, merge_size=config.vision_config.spatial_merge_size)
        self.visual = tower
        ignored = (*IGNORED, "^lm_head") if decoder.is_tied else IGNORED
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See GridLM."""
        out: Tensor = self.visual(pixels, grids)
        return out


class Qwen2VLForConditionalGeneration(QwenVL):
    """transformers' Qwen2VLForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, FrameTower(config.vision_config))


class Qwen25VLForConditionalGeneration(QwenVL):
    """transformers' Qwen2_5_VLForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, WindowTower(config.vision_config))
        self.tokens_per_second = float(config.vision_config.tokens_per_second)

    def grids_of(self, span: MediaSpan) -> Sequence[tuple[int, Grid, float]]:
        """See GridLM. Positions of frames follow real time: a video's tensors may hold
        "second_per_grid", the seconds between two of them, else 1."""
        ((offset, grid, interval),) = super().grids_of(span)
        if span.item.kind == "video":
            seconds = span.item.tensors.get("second_per_grid")
            interval = self.tokens_per_second * (1.0 if seconds is None else float(seconds))
        return ((offset, grid, interval),)


def _decoder_config(config: Any) -> DecoderConfig:
    text = config.text_config
    axes = sectioned_axes(text.rope_parameters.get("mrope_section", SECTIONS))
    return decoder_config(text, is_tied=config.tie_word_embeddings, axes=axes)
