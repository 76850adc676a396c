"""ERNIE 4.5 VL's vision tower, and the resampler that merges patches into tokens of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    Activation,
    Grid,
    LayerNorm,
    Linear,
    RMSNorm,
    VisionConfig,
    VisionEncoder,
    to_device,
    vision_theta,
)


class VisionTower(VisionEncoder):
    """Pixels [P, patch_dim] of all grids -> patch features [P, size]."""

    def __init__(self, config: Any) -> None:
        encoder = VisionConfig(
            size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.depth,
            num_heads=config.num_heads,
            patch_shape=(config.in_channels * config.patch_size**2,),
            norm_eps=config.rms_norm_eps,
            activation=config.hidden_act,
            theta=vision_theta(config),
            merge_size=config.spatial_merge_size,
        )
        super().__init__(encoder)
        self.ln = LayerNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Returns the features in the order of the pixels."""
        out: Tensor = self.ln(super().forward(pixels, grids))
        return out


class ResamplerMLP(nn.Module):
    """MLP with GELU, followed by a LayerNorm."""

    def __init__(self, in_size: int, out_size: int, eps: float) -> None:
        super().__init__()
        self.fc1 = Linear(in_size, out_size, bias=True)
        self.fc2 = Linear(out_size, out_size, bias=True)
        self.ln = LayerNorm(out_size, eps)
        self.activation = Activation("gelu")

    def forward(self, x: Tensor) -> Tensor:
        """[M, in_size] -> [M, out_size]."""
        out: Tensor = self.ln(self.fc2(self.activation(self.fc1(x))))
        return out


class Resampler(nn.Module):
    """Merges merge x merge patches of two frames (an image is used twice) into one token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        vision, text = config.vision_config, config.text_config
        if vision.temporal_merge_size != 2:
            raise ModelNotSupportedError(
                f"temporal_merge_size must be 2, as in transformers, got "
                f"{vision.temporal_merge_size}"
            )
        self.merge_size = vision.spatial_merge_size
        size = vision.hidden_size * self.merge_size**2
        self.spatial_linear = ResamplerMLP(size, size, vision.rms_norm_eps)
        self.temporal_linear = ResamplerMLP(2 * size, size, vision.rms_norm_eps)
        self.mlp = Linear(size, text.hidden_size, bias=True)
        self.after_norm = RMSNorm(text.hidden_size, text.rms_norm_eps)

    def forward(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Patch features [P, vision size] -> tokens of all grids [M, hidden]."""
        x = self.spatial_linear(x.reshape(-1, x.shape[-1] * self.merge_size**2))
        x = self.temporal_linear(self._pair_frames(x, grids))
        out: Tensor = self.after_norm(self.mlp(x))
        return out

    def _pair_frames(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """[cells, S] -> [M, 2 S]: concatenates each cell with the same cell of the next frame."""
        if all(frames == 1 for frames, _, _ in grids):
            return torch.cat([x, x], -1)
        rows, start = [], 0
        for frames, height, width in grids:
            num_cells = height * width // self.merge_size**2
            cells = torch.arange(start, start + frames * num_cells)
            start += frames * num_cells
            rows.append(_frame_pairs(cells.view(frames, num_cells)))
        pairs = to_device(torch.cat(rows), x.device)
        return x[pairs].flatten(1)


def _frame_pairs(cells: Tensor) -> Tensor:
    """Cell indices [frames, N] -> [N * pairs, 2]. An odd last frame is left out; a single frame is
    paired with itself."""
    if cells.shape[0] == 1:
        cells = cells.repeat(2, 1)
    even = cells[: cells.shape[0] // 2 * 2]
    return even.view(-1, 2, cells.shape[1]).transpose(1, 2).reshape(-1, 2)
