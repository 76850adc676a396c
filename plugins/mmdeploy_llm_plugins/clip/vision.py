"""The vision towers, which make one vector of an image.

CLIP      a learned token is computed with the patches; its state is the vector
SigLIP    a learned query attends to the states of all patches
SigLIP 2  the same, also on grids of any size, whose positions are resampled

Shapes: I images, P patches of all images, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    MLP,
    LayerNorm,
    Linear,
    MergedLinear,
    PatchEmbed,
    PlainVisionBlock,
    PlainVisionConfig,
    PositionTable,
    Segments,
    vision_activation,
)


class Tower(nn.Module):
    """Patches, learned positions, layers and a norm at the end."""

    def __init__(self, config: Any, patch_shape: Sequence[int], *, patch_bias: bool) -> None:
        super().__init__()
        size = config.hidden_size
        own = PlainVisionConfig(
            size=size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            image_side=1,
            merge_size=1,
            patch_size=config.patch_size,
            norm_eps=config.layer_norm_eps,
            activation=config.hidden_act,
        )
        self.patch_embed = PatchEmbed(size, patch_shape, bias=patch_bias)
        self.blocks = nn.ModuleList(PlainVisionBlock(own) for _ in range(own.num_layers))
        self.norm = LayerNorm(size, config.layer_norm_eps)

    def layers(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Computes all layers, [P, size] -> [P, size]. lengths: patches of each image."""
        segments = Segments(lengths, x.device)
        for block in self.blocks:
            x = block(x, segments)
        return x


def square_side(config: Any) -> int:
    """Returns the pixels along a side of an image. Raises ModelNotSupportedError for sizes that are
    not one number, and for one that is no multiple of the patches'."""
    side, patch = config.image_size, config.patch_size
    if not isinstance(side, int) or not isinstance(patch, int) or side % patch:
        raise ModelNotSupportedError(
            f"image_size {side!r:.40} and patch_size {patch!r:.40} of the vision tower are not "
            "supported, only whole numbers, the first a multiple of the second"
        )
    return side


def patches(pixels: Tensor, patch: int) -> Tensor:
    """Cuts images [I, C, height, width] into rows [P, C * patch * patch], line by line."""
    num, channels, height, width = pixels.shape
    cells = pixels.view(num, channels, height // patch, patch, width // patch, patch)
    return cells.permute(0, 2, 4, 1, 3, 5).reshape(-1, channels * patch * patch)


class ClassTower(Tower):
    """CLIP's, for images of one size."""

    def __init__(self, config: Any) -> None:
        side, patch, size = square_side(config), config.patch_size, config.hidden_size
        super().__init__(config, (config.num_channels, patch, patch), patch_bias=False)
        self.patch = patch
        self.class_token = nn.Parameter(torch.empty(size), requires_grad=False)
        self.positions = nn.Parameter(torch.empty((side // patch) ** 2 + 1, size), False)
        self.first_norm = LayerNorm(size, config.layer_norm_eps)

    def forward(self, pixels: Sequence[Tensor]) -> Tensor:
        """Makes vectors [I, size] of images [C, side, side] each."""
        x = self.patch_embed(patches(torch.stack(list(pixels)), self.patch))
        x = x.view(len(pixels), -1, x.shape[-1])
        token = self.class_token.expand(len(pixels), 1, -1)
        x = self.first_norm(torch.cat([token, x], 1) + self.positions)
        num = x.shape[1]
        x = self.layers(x.flatten(0, 1), [num] * len(pixels))
        out: Tensor = self.norm(x[::num])
        return out


class AttentionHead(nn.Module):
    """Makes one vector of the patches of an image: a learned query attends to them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_attention_heads
        self.probe = nn.Parameter(torch.empty(1, 1, size), requires_grad=False)
        self.in_proj = MergedLinear(size, {"q": size, "k": size, "v": size}, bias=True)
        self.out_proj = Linear(size, size, bias=True)
        self.norm = LayerNorm(size, config.layer_norm_eps)
        activation = vision_activation(config.hidden_act)
        self.mlp = MLP(size, config.intermediate_size, size, activation)

    def forward(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """[P, size] -> [I, size]."""
        query = self._heads(self.in_proj(self.probe[0]))[0]  # [H, 1, D]
        _, keys, values = self._heads(self.in_proj(x))  # [H, P, D]
        attended, start = [], 0
        for length in lengths:
            rows = slice(start, start + length)
            start += length
            found = F.scaled_dot_product_attention(query, keys[:, rows], values[:, rows])
            attended.append(found.transpose(0, 1).flatten(1))
        states = self.out_proj(torch.cat(attended))
        out: Tensor = states + self.mlp(self.norm(states))
        return out

    def _heads(self, qkv: Tensor) -> Sequence[Tensor]:
        """Splits [N, 3 size] into three of [H, N, D]."""
        parts = qkv.view(len(qkv), 3, self.num_heads, -1).permute(1, 2, 0, 3)
        return parts.unbind()


class QueryTower(Tower):
    """SigLIP's, for images of one size."""

    def __init__(self, config: Any) -> None:
        check_head(config)
        side, self_patch = square_side(config), config.patch_size
        super().__init__(config, (config.num_channels, self_patch, self_patch), patch_bias=True)
        self.patch = self_patch
        num = (side // self_patch) ** 2
        self.positions = nn.Parameter(torch.empty(num, config.hidden_size), requires_grad=False)
        self.head = AttentionHead(config)

    def forward(self, pixels: Sequence[Tensor]) -> Tensor:
        """Makes vectors [I, size] of images [C, side, side] each."""
        x = self.patch_embed(patches(torch.stack(list(pixels)), self.patch))
        x = x.view(len(pixels), -1, x.shape[-1]) + self.positions
        lengths = [x.shape[1]] * len(pixels)
        out: Tensor = self.head(self.norm(self.layers(x.flatten(0, 1), lengths)), lengths)
        return out


class FlexibleTower(Tower):
    """SigLIP 2's for grids of any size."""

    def __init__(self, config: Any) -> None:
        check_head(config)
        values = config.num_channels * config.patch_size**2
        super().__init__(config, (values,), patch_bias=True)
        self.pos_embed = PositionTable(
            config.num_patches, config.hidden_size, align_corners=False, antialias=True
        )
        self.head = AttentionHead(config)

    def forward(self, rows: Sequence[Tensor], grids: Sequence[tuple[int, int]]) -> Tensor:
        """Makes vectors [I, size] of the patches of each image, in rows [P_i, values]."""
        lengths = [height * width for height, width in grids]
        x = self.patch_embed(torch.cat(list(rows)))
        x = x + self.pos_embed([(1, height, width) for height, width in grids], 1)
        out: Tensor = self.head(self.norm(self.layers(x, lengths)), lengths)
        return out


def check_head(config: Any) -> None:
    """Raises ModelNotSupportedError for a tower without the head that makes a vector."""
    if not getattr(config, "vision_use_head", True):
        raise ModelNotSupportedError(
            "vision_use_head of this model is false: without the head its images have no vector"
        )
