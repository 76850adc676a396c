"""The vision tower of LFM2-VL, SigLIP 2 for images of any size, and the projector that merges its
patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mmdeploy_llm.layers import (
    Activation,
    Grid,
    LayerNorm,
    Linear,
    PatchEmbed,
    PlainVisionBlock,
    PlainVisionConfig,
    PositionTable,
    Segments,
    frame_lengths,
    vision_activation,
)

PROJECTOR_EPS = 1e-5  # not in the config


class SiglipTower(nn.Module):
    """Pixels [P, patch_dim] of all grids -> patch features [P, size], in blocks of merged patches.
    Attention covers a tile, or a frame of a grid."""

    def __init__(self, config: Any, merge: int) -> None:
        """Raises ModelNotSupportedError for an unknown activation."""
        super().__init__()
        size, patch, self.merge_size = config.hidden_size, config.patch_size, merge
        block = PlainVisionConfig(
            size=size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            image_side=int(config.num_patches**0.5),
            merge_size=merge,
            patch_size=patch,
            num_channels=config.num_channels,
            norm_eps=config.layer_norm_eps,
            activation=config.hidden_act,
        )
        self.num_channels = config.num_channels
        self.patch_embed = PatchEmbed(size, (config.num_channels * patch**2,), bias=True)
        self.pos_embed = PositionTable(
            config.num_patches, size, align_corners=False, antialias=True
        )
        self.blocks = nn.ModuleList(PlainVisionBlock(block) for _ in range(block.num_layers))
        self.post_layernorm = LayerNorm(size, config.layer_norm_eps)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Returns the features in the order of the pixels."""
        # The weight reads the channels of a pixel together.
        values = pixels.view(pixels.shape[0], self.num_channels, -1).transpose(1, 2)
        x = self.patch_embed(values.flatten(1)).add_(self.pos_embed(grids, self.merge_size))
        segments = Segments(frame_lengths(grids), x.device)
        for block in self.blocks:
            x = block(x, segments)
        out: Tensor = self.post_layernorm(x)
        return out


class Projector(nn.Module):
    """Merges merge x merge patches into one token of the decoder."""

    def __init__(self, config: Any) -> None:
        """Raises ModelNotSupportedError for an unknown activation."""
        super().__init__()
        vision_activation(config.projector_hidden_act)
        self.merged_size = config.vision_config.hidden_size * config.downsample_factor**2
        has_norm, bias = config.projector_use_layernorm, config.projector_bias
        self.norm = LayerNorm(self.merged_size, PROJECTOR_EPS) if has_norm else None
        self.fc1 = Linear(self.merged_size, config.projector_hidden_size, bias=bias)
        self.activation = Activation(config.projector_hidden_act)
        self.fc2 = Linear(config.projector_hidden_size, config.text_config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Patch features [P, vision size] in blocks -> [M, hidden]."""
        x = x.reshape(-1, self.merged_size)
        x = x if self.norm is None else self.norm(x)
        out: Tensor = self.fc2(self.activation(self.fc1(x)))
        return out
