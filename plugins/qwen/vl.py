"""Qwen2-VL and Qwen2.5-VL: the Qwen2 decoder with M-RoPE, each with its vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    Grid,
    encode_grids,
    grid_positions,
    media_grid,
    sectioned_axes,
)
from mmdeploy_llm.weights.map import Target, WeightMap

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


class GridLM(CausalLM):
    """A decoder with M-RoPE and a vision tower: what all Qwen-VL families share.

    visual: called with the pixels [P, patch_dim] and the grids of all media, gives their rows
    [M, media size].
    """

    def __init__(
        self,
        decoder: DecoderConfig,
        visual: nn.Module,
        *,
        merge_size: int,
        renames: Sequence[tuple[str, str]],
    ) -> None:
        super().__init__(decoder)
        self.merge_size = merge_size
        self.visual = visual
        ignored = (*IGNORED, "^lm_head") if decoder.is_tied else IGNORED
        self._weights = WeightMap(self, renames=renames, ignored=ignored)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """One [num_tokens, media size] per item; all items in one pass."""
        return encode_grids(items, self.visual, self.model.embed_tokens.weight.device)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor:
        """[3, num_tokens]: transformers' get_rope_index."""
        return grid_positions(num_tokens, [part for span in media for part in self.grids_of(span)])

    def grids_of(self, span: MediaSpan) -> Sequence[tuple[int, Grid, float]]:
        """The grids of tokens of a media item: where each begins, its size, and the positions
        between two of its frames."""
        frames, height, width = media_grid(span.item)
        grid = frames, height // self.merge_size, width // self.merge_size
        return ((span.offset, grid, self.interval(span.item)),)

    def interval(self, item: MediaInput) -> float:
        """Positions between two frames."""
        return 1.0

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map."""
        return self._weights.targets(key)


class Qwen2VLForConditionalGeneration(GridLM):
    """transformers' Qwen2VLForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            _decoder_config(config),
            FrameTower(config.vision_config),
            merge_size=config.vision_config.spatial_merge_size,
            renames=RENAMES,
        )


class Qwen25VLForConditionalGeneration(GridLM):
    """transformers' Qwen2_5_VLForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            _decoder_config(config),
            WindowTower(config.vision_config),
            merge_size=config.vision_config.spatial_merge_size,
            renames=RENAMES,
        )
        self.tokens_per_second = float(config.vision_config.tokens_per_second)

    def interval(self, item: MediaInput) -> float:
        """Positions between two frames. A video's tensors may hold "second_per_grid", the seconds
        between them."""
        if item.kind == "image":
            return 1.0
        seconds = item.tensors.get("second_per_grid")
        return self.tokens_per_second * (1.0 if seconds is None else float(seconds))


def _decoder_config(config: Any) -> DecoderConfig:
    text = config.text_config
    axes = sectioned_axes(text.rope_parameters.get("mrope_section", SECTIONS))
    return decoder_config(text, is_tied=config.tie_word_embeddings, axes=axes)
