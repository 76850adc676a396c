"""The vision tower of MiniCPM-V 4.6: SigLIP for images of any size, whose inner layer merges
windows of 2 x 2 patches, and the merger of 2 x 2 again into tokens of the decoder.

patches --> blocks up to insert_layer_id --> windows merged --> other blocks --> merger --> tokens
   16            16                             4                  4                          1

An image that keeps four times as many tokens ("4x") skips the merging of windows.

P: patches of all images, D: size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.layers import (
    MLP,
    Grid,
    LayerNorm,
    PatchEmbed,
    PlainVisionAttention,
    PlainVisionBlock,
    PlainVisionConfig,
    Segments,
    frame_lengths,
    patch_positions,
    to_device,
    vision_activation,
)

SIDE = 2  # of a window, in patches, and of a merged block
WINDOW = SIDE**2
MERGER_EPS = 1e-6  # not in the config


class Positions(nn.Module):
    """Learned embeddings on a square grid: a patch takes that of the cell which its place in the
    image falls into."""

    def __init__(self, side: int, size: int) -> None:
        super().__init__()
        self.side = side
        self.weight = nn.Parameter(torch.empty(side**2, size), requires_grad=False)

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        """Returns the embeddings of all patches, [P, size], in the patches' order."""
        cells = torch.cat([nearest_cells(grid, merge, self.side) for grid in grids])
        return self.weight[to_device(cells, self.weight.device)]


class WindowMerger(nn.Module):
    """Merges windows of patches into one each: attention within a window, then an MLP, both added
    to their inputs, which the MLP averages."""

    def __init__(self, config: PlainVisionConfig) -> None:
        super().__init__()
        size, inner = config.size, config.intermediate_size
        self.norm = LayerNorm(size, config.norm_eps)
        self.attn = PlainVisionAttention(size, config.num_heads)
        self.pre_norm = LayerNorm(WINDOW * size, config.norm_eps)
        activation = vision_activation("gelu_pytorch_tanh")
        self.mlp = MLP(WINDOW * size, WINDOW * inner, size, activation)

    def forward(self, x: Tensor) -> Tensor:
        """Merges patches in the order of windows, [P, D] -> [P / WINDOW, D]."""
        segments = Segments([WINDOW] * (x.shape[0] // WINDOW), x.device)
        windows = (x + self.attn(self.norm(x), segments)).view(-1, WINDOW, x.shape[1])
        out: Tensor = self.mlp(self.pre_norm(windows.flatten(1))) + windows.mean(1)
        return out


class Merger(nn.Module):
    """Merges 2 x 2 features into one token of the decoder."""

    def __init__(self, size: int, out_size: int) -> None:
        super().__init__()
        self.pre_norm = LayerNorm(WINDOW * size, MERGER_EPS)
        self.mlp = MLP(WINDOW * size, WINDOW * size, out_size, vision_activation("gelu"))

    def forward(self, x: Tensor) -> Tensor:
        """Merges features in the order of blocks, [P, D] -> [P / WINDOW, out_size]."""
        out: Tensor = self.mlp(self.pre_norm(x.view(-1, WINDOW * x.shape[1])))
        return out


class MiniCPMTower(nn.Module):
    """Pixels [P, patch_dim] of all grids -> features [P / WINDOW, D], or [P, D] without the merging
    of windows. Attention covers a tile."""

    def __init__(self, vision: Any) -> None:
        """vision: transformers' config. Raises ModelNotSupportedError for an unknown activation."""
        super().__init__()
        config = tower_config(vision)
        patch_shape = (config.num_channels, config.patch_size, config.patch_size)
        self.insert_layer = vision.insert_layer_id
        self.patch_embed = PatchEmbed(config.size, patch_shape, bias=True)
        self.positions = Positions(config.image_side, config.size)
        self.blocks = nn.ModuleList(PlainVisionBlock(config) for _ in range(config.num_layers))
        self.window_merger = WindowMerger(config)
        self.post_layernorm = LayerNorm(config.size, config.norm_eps)

    def forward(self, pixels: Tensor, grids: Sequence[Grid], merge: int) -> Tensor:
        """Returns the features in the order of the pixels, which come in blocks of merge x merge:
        windows are merged if a token takes 4 x 4 patches, not if it takes 2 x 2."""
        x = self.patch_embed(pixels).add_(self.positions(grids, merge))
        has_windows = merge == SIDE**2
        if has_windows:
            x = in_windows(x)
        lengths = frame_lengths(grids)
        segments = Segments(lengths, x.device)
        for number, block in enumerate(self.blocks):
            x = block(x, segments)
            if has_windows and number == self.insert_layer:
                x = self.window_merger(x)
                segments = Segments([length // WINDOW for length in lengths], x.device)
        out: Tensor = self.post_layernorm(x)
        return out


def tower_config(vision: Any) -> PlainVisionConfig:
    """Converts the vision config."""
    return PlainVisionConfig(
        size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        image_side=vision.image_size // vision.patch_size,
        merge_size=SIDE,
        patch_size=vision.patch_size,
        num_channels=vision.num_channels,
        norm_eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
    )


def in_windows(x: Tensor) -> Tensor:
    """Orders the rows [P, D] of blocks of 4 x 4 patches, line by line, in windows of 2 x 2."""
    return x.view(-1, SIDE, SIDE, SIDE, SIDE, x.shape[1]).transpose(2, 3).flatten(0, 4)


def nearest_cells(grid: Grid, merge: int, side: int) -> Tensor:
    """Returns the cell of a table of side x side for each patch, [P] int64, in the patches' order.
    Source: get_vision_nearest_position_ids of transformers, whose float32 decides at borders."""
    borders = torch.arange(1 / side, 1.0, 1 / side)
    lines, columns = (
        torch.bucketize(torch.arange(length) / length, borders, right=True) for length in grid[1:]
    )
    line, column = patch_positions([grid], merge, torch.device("cpu"))
    return lines[line] * side + columns[column]
