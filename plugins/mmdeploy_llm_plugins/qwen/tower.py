"""The vision towers of Qwen2-VL and Qwen2.5-VL: patches in, tokens of the decoder out.

Qwen2-VL attends within whole frames. In Qwen2.5-VL most layers attend within windows, some within
whole frames: patches are reordered once, window by window within each frame, so that both are
contiguous; the tokens are put back in order at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    MLP,
    GatedMLP,
    Grid,
    LayerNorm,
    PatchEmbed,
    RMSNorm,
    Rotary,
    Segments,
    VisionBlock,
    VisionConfig,
    VisionEncoder,
    axial_rotary,
    frame_lengths,
    patch_positions,
    to_device,
    vision_theta,
)

NORM_EPS = 1e-6  # not in the config


class PatchMerger(nn.Module):
    """Merges merge x merge patches into one token of the decoder."""

    def __init__(self, norm: nn.Module, size: int, out_size: int, merge_size: int) -> None:
        """norm: applied to each patch before the merge."""
        super().__init__()
        self.merged_size = size * merge_size**2
        self.ln_q = norm
        self.mlp = MLP(self.merged_size, self.merged_size, out_size, F.gelu)

    def forward(self, x: Tensor) -> Tensor:
        """[P, size] -> [P / merge ** 2, out_size]."""
        out: Tensor = self.mlp(self.ln_q(x).view(-1, self.merged_size))
        return out


class FrameTower(VisionEncoder):
    """Qwen2-VL: pixels [P, patch_dim] of all grids -> tokens of all grids [M, out_size]."""

    def __init__(self, config: Any) -> None:
        size, patch = config.embed_dim, config.patch_size
        encoder = VisionConfig(
            size=size,
            intermediate_size=int(size * config.mlp_ratio),
            num_layers=config.depth,
            num_heads=config.num_heads,
            patch_shape=(config.in_channels, config.temporal_patch_size, patch, patch),
            norm_eps=NORM_EPS,
            activation=config.hidden_act,
            theta=vision_theta(config),
            merge_size=config.spatial_merge_size,
        )
        super().__init__(encoder)
        norm = LayerNorm(size, NORM_EPS)
        self.merger = PatchMerger(norm, size, config.hidden_size, self.merge_size)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Returns the tokens in the order of the pixels."""
        out: Tensor = self.merger(super().forward(pixels, grids))
        return out


class WindowTower(nn.Module):
    """Qwen2.5-VL: pixels [P, patch_dim] of all grids -> tokens of all grids [M, out_size]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.hidden_act != "silu":
            raise ModelNotSupportedError(
                f"hidden_act {config.hidden_act!r} of the vision tower is not supported, only "
                "'silu'"
            )
        size, patch = config.hidden_size, config.patch_size
        norm = partial(RMSNorm, size, NORM_EPS)
        self.merge_size = config.spatial_merge_size
        self.window_size = config.window_size // self.merge_size // patch  # in tokens
        self.full_blocks = frozenset(config.fullatt_block_indexes)
        patch_shape = (config.in_channels, config.temporal_patch_size, patch, patch)
        self.patch_embed = PatchEmbed(size, patch_shape)
        self.rotary = Rotary(axial_rotary(size // config.num_heads, vision_theta(config)))
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                config.num_heads,
                norm=norm,
                mlp=GatedMLP(size, config.intermediate_size, bias=True),
            )
            for _ in range(config.depth)
        )
        self.merger = PatchMerger(norm(), size, config.out_hidden_size, self.merge_size)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Returns the tokens in the order of the pixels."""
        device, unit = pixels.device, self.merge_size**2
        order, window_lengths = window_order(grids, self.merge_size, self.window_size)
        patch_order = (order[:, None] * unit + torch.arange(unit)).flatten()
        windows = Segments([length * unit for length in window_lengths], device)
        frames = Segments(frame_lengths(grids), device)  # windows do not cross them
        positions = patch_positions(grids, self.merge_size, device)
        patch_order = to_device(patch_order, device)
        rope = self.rotary(positions[:, patch_order])
        x = self.patch_embed(pixels.index_select(0, patch_order))
        for index, block in enumerate(self.blocks):
            x = block(x, frames if index in self.full_blocks else windows, rope)
        tokens: Tensor = self.merger(x)
        return tokens.index_select(0, to_device(order.argsort(), device))


def window_order(
    grids: Sequence[Grid], merge_size: int, window_size: int
) -> tuple[Tensor, list[int]]:
    """Returns the token indices window by window [M], and each window's length in tokens.

    A window is window_size x window_size tokens of one frame, fewer at its right and lower edge.
    """
    window_ids, start = [], 0
    for frames, height, width in grids:
        rows, columns = height // merge_size, width // merge_size
        across = -(-columns // window_size)
        down = -(-rows // window_size)
        ids = (torch.arange(rows) // window_size)[:, None] * across
        ids = ids + torch.arange(columns) // window_size
        ids = ids + (torch.arange(frames) * across * down)[:, None, None]
        window_ids.append(ids.flatten() + start)
        start += frames * across * down
    window_of_token = torch.cat(window_ids)
    lengths = torch.bincount(window_of_token)
    return window_of_token.argsort(stable=True), lengths.tolist()
