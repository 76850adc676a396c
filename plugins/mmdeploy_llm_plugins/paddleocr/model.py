"""PaddleOCR-VL: ERNIE 4.5's dense decoder with half-split rope and M-RoPE, a vision tower with a
learned position table, and a projector that merges patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.layers import (
    MLP,
    DecoderConfig,
    Grid,
    GridLM,
    LayerNorm,
    VisionConfig,
    VisionEncoder,
    sectioned_axes,
    vision_theta,
)
from mmdeploy_llm.weights.map import WeightMap
from mmdeploy_llm_plugins.ernie.text import IGNORED, decoder_config

# From the published names, and from those of transformers' modules, to ours.
RENAMES = (
    (r"^model\.language_model\.", "model."),
    (r"^model\.(visual|projector)\.", r"\1."),
    (r"^mlp_AR\.", "projector."),
    (r"^projector\.linear_", "projector.mlp.fc"),
    (r"^visual\.vision_model\.", "visual."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.", "visual.pos_embed."),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
    (r"^(visual\.blocks\.\d+)\.layer_norm", r"\1.norm"),
    (r"^(visual\.blocks\.\d+)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(visual\.blocks\.\d+)\.self_attn\.", r"\1.attn."),
)
# Weights from the tower's pre-training that the model does not use.
UNUSED = (r"\.packing_position_embedding\.", r"\.vision_model\.head\.", r"\.position_ids$")
SECTIONS = (16, 24, 24)  # transformers' default: channel pairs of time, height and width
PROJECTOR_EPS = 1e-5  # not in the config


class VisionTower(VisionEncoder):
    """Pixels [P, patch_dim] of all grids -> patch features [P, size]."""

    def __init__(self, config: Any) -> None:
        size, patch = config.hidden_size, config.patch_size
        encoder = VisionConfig(
            size=size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            patch_shape=(config.num_channels, patch, patch),
            patch_bias=True,
            norm_eps=config.layer_norm_eps,
            activation=config.hidden_act,
            theta=vision_theta(config),
            merge_size=config.spatial_merge_size,
            num_positions=(config.image_size // patch) ** 2,
        )
        super().__init__(encoder)
        self.post_layernorm = LayerNorm(size, config.layer_norm_eps)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Returns the features in the order of the pixels."""
        out: Tensor = self.post_layernorm(super().forward(pixels, grids))
        return out


class Projector(nn.Module):
    """Merges merge x merge patches into one token of the decoder."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision = config.vision_config
        self.merged_size = vision.hidden_size * vision.spatial_merge_size**2
        self.pre_norm = LayerNorm(vision.hidden_size, PROJECTOR_EPS)
        self.mlp = MLP(self.merged_size, self.merged_size, config.text_config.hidden_size, F.gelu)

    def forward(self, x: Tensor) -> Tensor:
        """Patch features [P, vision size] -> [P / merge ** 2, hidden]."""
        out: Tensor = self.mlp(self.pre_norm(x).view(-1, self.merged_size))
        return out


class PaddleOCRVLForConditionalGeneration(GridLM):
    """transformers' PaddleOCRVLForConditionalGeneration."""

    def __init__(self, config: Any) -> None:
        decoder = _decoder_config(config)
        super().__init__(decoder, merge_size=config.vision_config.spatial_merge_size)
        self.visual = VisionTower(config.vision_config)
        self.projector = Projector(config)
        ignored = (*IGNORED, *UNUSED, "^lm_head") if decoder.is_tied else (*IGNORED, *UNUSED)
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)

    def encode(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """See GridLM."""
        out: Tensor = self.projector(self.visual(pixels, grids))
        return out


def _decoder_config(config: Any) -> DecoderConfig:
    text = config.text_config
    decoder = decoder_config(text)
    axes = sectioned_axes(text.rope_parameters.get("mrope_section", SECTIONS))
    rotary = replace(decoder.rotary, is_interleaved=False, axes=axes)
    return replace(decoder, rotary=rotary, is_tied=config.tie_word_embeddings)
