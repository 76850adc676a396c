"""ERNIE 4.5 VL's vision tower, and the resampler that merges patches into tokens of the decoder."""

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
    Grid,
    LayerNorm,
    Linear,
    PatchEmbed,
    RMSNorm,
    Rotary,
    Segments,
    VisionBlock,
    axial_rotary,
    frame_lengths,
    patch_positions,
    quick_gelu,
)

ACTIVATIONS = {"quick_gelu": quick_gelu, "gelu": F.gelu, "silu": F.silu}


class VisionTower(nn.Module):
    """Pixels [P, patch_dim] of all grids -> patch features [P, size]. Frames do not see each
    other."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        if config.hidden_act not in ACTIVATIONS:
            raise ModelNotSupportedError(
                f"hidden_act {config.hidden_act!r} of the vision tower is not supported, only "
                f"{', '.join(ACTIVATIONS)}"
            )
        size = config.hidden_size
        activation = ACTIVATIONS[config.hidden_act]
        norm = partial(LayerNorm, size, config.rms_norm_eps)
        self.merge_size = config.spatial_merge_size
        self.patch_embed = PatchEmbed(size, (config.in_channels * config.patch_size**2,))
        theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
        self.rotary = Rotary(axial_rotary(size // config.num_heads, theta))
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                config.num_heads,
                norm=norm,
                mlp=MLP(size, config.intermediate_size, size, activation),
            )
            for _ in range(config.depth)
        )
        self.ln = norm()

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """In the order of the pixels."""
        x = self.patch_embed(pixels)
        rope = self.rotary(patch_positions(grids, self.merge_size, x.device))
        segments = Segments(frame_lengths(grids), x.device)
        for block in self.blocks:
            x = block(x, segments, rope)
        out: Tensor = self.ln(x)
        return out


class ResamplerMLP(nn.Module):
    """MLP with GELU and a LayerNorm behind it."""

    def __init__(self, in_size: int, out_size: int, eps: float) -> None:
        super().__init__()
        self.fc1 = Linear(in_size, out_size, bias=True)
        self.fc2 = Linear(out_size, out_size, bias=True)
        self.ln = LayerNorm(out_size, eps)

    def forward(self, x: Tensor) -> Tensor:
        """[M, in_size] -> [M, out_size]."""
        out: Tensor = self.ln(self.fc2(F.gelu(self.fc1(x))))
        return out


class Resampler(nn.Module):
    """merge x merge patches, then two frames (an image counts twice) -> one token."""

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
        """[cells, S] -> [M, 2 S]: each cell beside the same cell of the next frame."""
        if all(frames == 1 for frames, _, _ in grids):
            return torch.cat([x, x], -1)
        rows, start = [], 0
        for frames, height, width in grids:
            num_cells = height * width // self.merge_size**2
            cells = torch.arange(start, start + frames * num_cells)
            start += frames * num_cells
            rows.append(_frame_pairs(cells.view(frames, num_cells)))
        pairs = torch.cat(rows).to(x.device)
        return x[pairs].flatten(1)


def _frame_pairs(cells: Tensor) -> Tensor:
    """Cell numbers [frames, N] -> [N * pairs, 2]; a frame without a partner is left out, a single
    one is its own."""
    if cells.shape[0] == 1:
        cells = cells.repeat(2, 1)
    even = cells[: cells.shape[0] // 2 * 2]
    return even.view(-1, 2, cells.shape[1]).transpose(1, 2).reshape(-1, 2)
