"""Qwen3-VL's vision tower: learned positions, and features of inner layers next to the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.layers import MLP, Grid, LayerNorm, VisionConfig, VisionEncoder, vision_theta

NORM_EPS = 1e-6  # not in the config


class Merger(nn.Module):
    """Merges merge x merge patches into one row of the decoder's width. is_late: the norm applies
    to the merged patches, not to each patch."""

    def __init__(self, config: Any, *, is_late: bool) -> None:
        super().__init__()
        size = config.hidden_size
        self.merged_size = size * config.spatial_merge_size**2
        self.is_late = is_late
        self.norm = LayerNorm(self.merged_size if is_late else size, NORM_EPS)
        self.mlp = MLP(self.merged_size, self.merged_size, config.out_hidden_size, F.gelu)

    def forward(self, x: Tensor) -> Tensor:
        """[P, size] -> [P / merge ** 2, out_hidden_size]."""
        if self.is_late:
            merged = self.norm(x.view(-1, self.merged_size))
        else:
            merged = self.norm(x).view(-1, self.merged_size)
        out: Tensor = self.mlp(merged)
        return out


class DeepstackTower(VisionEncoder):
    """Pixels [P, patch_dim] of all grids -> [M, out_hidden_size * (1 + taps)]: each row holds a
    token, then the features of the tapped layers for the first layers of the decoder. A config
    without `deepstack_visual_indexes` taps no layer."""

    def __init__(self, config: Any) -> None:
        size, patch = config.hidden_size, config.patch_size
        encoder = VisionConfig(
            size=size,
            intermediate_size=config.intermediate_size,
            num_layers=config.depth,
            num_heads=config.num_heads,
            patch_shape=(config.in_channels, config.temporal_patch_size, patch, patch),
            patch_bias=True,
            norm_eps=NORM_EPS,
            activation=config.hidden_act,
            theta=vision_theta(config),
            merge_size=config.spatial_merge_size,
            num_positions=config.num_position_embeddings,
            align_corners=True,
        )
        super().__init__(encoder)
        self.taps = tuple(getattr(config, "deepstack_visual_indexes", ()))
        self.merger = Merger(config, is_late=False)
        self.deepstack_merger_list = nn.ModuleList(Merger(config, is_late=True) for _ in self.taps)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Returns the rows in the order of the pixels."""
        features = []
        for layer, state in enumerate(self.states(pixels, grids)):
            x = state
            if layer in self.taps:
                features.append(self.deepstack_merger_list[self.taps.index(layer)](x))
        return torch.cat([self.merger(x), *features], -1)
