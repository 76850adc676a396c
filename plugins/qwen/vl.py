"""Qwen2.5-VL: the Qwen2 decoder with M-RoPE and a vision tower."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.hooks import MediaInput, MediaSpan
from mmdeploy_llm.layers import CausalLM, Grid, grid_positions, sectioned_axes
from mmdeploy_llm.weights.map import Target, WeightMap

from .text import IGNORED, decoder_config
from .tower import VisionTower

# From the published names, and from those of transformers' modules, to ours.
RENAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.visual\.", "visual."),
    (r"^visual\.merger\.mlp\.0\.", "visual.merger.mlp.fc1."),
    (r"^visual\.merger\.mlp\.2\.", "visual.merger.mlp.fc2."),
)


class QwenVLForConditionalGeneration(CausalLM):
    """transformers' Qwen2_5_VLForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        text, vision = config.text_config, config.vision_config
        axes = sectioned_axes(text.rope_parameters.get("mrope_section", (16, 24, 24)))
        is_tied = config.tie_word_embeddings
        super().__init__(decoder_config(text, is_tied=is_tied, axes=axes))
        self.merge_size = vision.spatial_merge_size
        self.tokens_per_second = vision.tokens_per_second
        self.visual = VisionTower(vision)
        ignored = (*IGNORED, "^lm_head") if is_tied else IGNORED
        self._weights = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode_media(self, items: Sequence[MediaInput]) -> Sequence[Tensor]:
        """One [num_tokens, hidden] per item; all items in one pass."""
        device = self.model.embed_tokens.weight.device
        pixels = torch.cat([item.tensors["pixels"] for item in items]).to(device)
        embeds = self.visual(pixels, [_grid(item) for item in items])
        return torch.split(embeds, [item.num_tokens for item in items])

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor:
        """[3, num_tokens]: transformers' get_rope_index."""
        spans = [
            (span.offset, self._token_grid(span.item), self._interval(span.item)) for span in media
        ]
        return grid_positions(num_tokens, spans)

    def _token_grid(self, item: MediaInput) -> Grid:
        frames, height, width = _grid(item)
        return frames, height // self.merge_size, width // self.merge_size

    def _interval(self, item: MediaInput) -> float:
        """Positions between two frames. A video's tensors may hold "second_per_grid", the seconds
        between them."""
        if item.kind == "image":
            return 1.0
        seconds = item.tensors.get("second_per_grid")
        return self.tokens_per_second * (1.0 if seconds is None else float(seconds))

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map."""
        return self._weights.targets(key)


def _grid(item: MediaInput) -> Grid:
    assert item.grid_thw is not None, "this family's processors set a grid"
    return item.grid_thw
