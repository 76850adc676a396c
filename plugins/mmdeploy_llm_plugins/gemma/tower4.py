"""The vision tower of Gemma 4: patches with learned positions for columns and rows, layers with
norms before and after attention and MLP, rotary angles for columns in the first half of a head and
for rows in the second, and an average over blocks of patches.

Shapes: P patches of all images, in blocks of k x k; M = P / k ** 2 tokens; H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.layers import Activation, Grid, LateRMSNorm, Linear, Segments, to_device

from .decoder4 import UnweightedNorm, check_options
from .text import ACTIVATION

BOUNDS = ("input_min", "input_max", "output_min", "output_max")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchPositions:
    """Positions of all patches, and what every layer makes of them.

    columns, rows: [P] int64. cosines, sines: [P, 1, D] float32, of the pairs (c, c + D / 4) within
    each half of a head. segments: patches of one image.
    """

    columns: Tensor
    rows: Tensor
    cosines: Tensor
    sines: Tensor
    segments: Segments


class ClippedLinear(nn.Module):
    """A linear layer whose inputs and outputs are limited to bounds of the checkpoint, if it has
    some."""

    input_min: Tensor
    input_max: Tensor
    output_min: Tensor
    output_max: Tensor

    def __init__(self, in_size: int, out_size: int, *, has_bounds: bool) -> None:
        super().__init__()
        self.linear = Linear(in_size, out_size)
        self.has_bounds = has_bounds
        for name in BOUNDS if has_bounds else ():
            setattr(self, name, nn.Parameter(torch.empty(()), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        """Computes [P, in_size] -> [P, out_size]."""
        if not self.has_bounds:
            plain: Tensor = self.linear(x)
            return plain
        out: Tensor = self.linear(torch.clamp(x, self.input_min, self.input_max))
        return torch.clamp(out, self.output_min, self.output_max)


class TowerAttention(nn.Module):
    """Attention within images, with norms of queries, keys and values, and scores that are not
    scaled."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        self.head_dim, self.num_heads = vision.head_dim, vision.num_attention_heads
        size, inner = vision.hidden_size, vision.num_attention_heads * vision.head_dim
        bounds = vision.use_clipped_linears
        self.q_proj = ClippedLinear(size, inner, has_bounds=bounds)
        self.k_proj = ClippedLinear(size, inner, has_bounds=bounds)
        self.v_proj = ClippedLinear(size, inner, has_bounds=bounds)
        self.o_proj = ClippedLinear(inner, size, has_bounds=bounds)
        self.q_norm = LateRMSNorm(self.head_dim, vision.rms_norm_eps)
        self.k_norm = LateRMSNorm(self.head_dim, vision.rms_norm_eps)
        self.v_norm = UnweightedNorm(vision.rms_norm_eps)

    def forward(self, x: Tensor, at: PatchPositions) -> Tensor:
        """Computes attention with its projections, [P, size] -> [P, size]."""
        shape = (x.shape[0], self.num_heads, self.head_dim)
        # Segments scale scores by D ** -0.5.
        q = rotated(self.q_norm(self.q_proj(x).view(shape)), at, self.head_dim**0.5)
        k = rotated(self.k_norm(self.k_proj(x).view(shape)), at)
        v = self.v_norm(self.v_proj(x).view(shape))
        out: Tensor = self.o_proj(at.segments.attend(q, k, v).flatten(1))
        return out


class TowerMLP(nn.Module):
    """Computes down(gelu(gate(x)) * up(x))."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        size, inner, bounds = (
            vision.hidden_size,
            vision.intermediate_size,
            vision.use_clipped_linears,
        )
        self.gate_proj = ClippedLinear(size, inner, has_bounds=bounds)
        self.up_proj = ClippedLinear(size, inner, has_bounds=bounds)
        self.down_proj = ClippedLinear(inner, size, has_bounds=bounds)
        self.activation = Activation(ACTIVATION)

    def forward(self, x: Tensor) -> Tensor:
        """Computes the MLP, [P, size] -> [P, size]."""
        out: Tensor = self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class TowerLayer(nn.Module):
    """Attention and MLP, each between two norms, which have the names of the decoder's."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        size, eps = vision.hidden_size, vision.rms_norm_eps
        self.self_attn, self.mlp = TowerAttention(vision), TowerMLP(vision)
        self.input_layernorm = LateRMSNorm(size, eps)
        self.post_self_attn_layernorm = LateRMSNorm(size, eps)
        self.post_attention_layernorm = LateRMSNorm(size, eps)
        self.post_mlp_layernorm = LateRMSNorm(size, eps)

    def forward(self, x: Tensor, at: PatchPositions) -> Tensor:
        """Computes the layer, [P, size] -> [P, size], in the memory of `x`."""
        x = x.add_(self.post_self_attn_layernorm(self.self_attn(self.input_layernorm(x), at)))
        return x.add_(self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x))))


class Gemma4Tower(nn.Module):
    """Computes tokens [M, size] from the pixels of images. Raises ModelNotSupportedError for
    options that it does not have."""

    def __init__(self, vision: Any) -> None:
        super().__init__()
        allowed = {
            "hidden_activation": (ACTIVATION,),
            "num_key_value_heads": (vision.num_attention_heads,),
            "attention_bias": (False, None),
        }
        check_options(vision, allowed)
        self.size, self.merge_size = vision.hidden_size, vision.pooling_kernel_size
        self.head_dim, self.theta = vision.head_dim, vision.rope_parameters["rope_theta"]
        self.input_proj = Linear(3 * vision.patch_size**2, self.size)
        table = torch.empty(2, vision.position_embedding_size, self.size)
        self.position_embedding_table = nn.Parameter(table, requires_grad=False)
        self.layers = nn.ModuleList(TowerLayer(vision) for _ in range(vision.num_hidden_layers))
        self.std_bias = self.std_scale = None
        if vision.standardize:
            self.std_bias = nn.Parameter(torch.empty(self.size), requires_grad=False)
            self.std_scale = nn.Parameter(torch.empty(self.size), requires_grad=False)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Encodes pixels [P, 3 * patch * patch], between 0 and 1, channel by channel. grids: the
        frames, rows and columns of each item."""
        dtype, table = self.input_proj.weight.dtype, self.position_embedding_table
        values = pixels.view(pixels.shape[0], 3, -1).transpose(1, 2).flatten(1)  # channels last
        at = self._positions(grids, pixels.device)
        x = self.input_proj((2 * (values - 0.5)).to(dtype))
        x = x + (table[0][at.columns] + table[1][at.rows])
        for layer in self.layers:
            x = layer(x, at)
        # Sums reach values that bfloat16 rounds and float16 does not have.
        out: Tensor = x.view(-1, self.merge_size**2, self.size).float().mean(1) * self.size**0.5
        if self.std_bias is not None and self.std_scale is not None:
            out = (out - self.std_bias.float()) * self.std_scale.float()
        return out.to(dtype)

    def _positions(self, grids: Sequence[Grid], device: torch.device) -> PatchPositions:
        found = [block_positions(grid, self.merge_size) for grid in grids]
        columns, rows = (torch.cat(parts) for parts in zip(*found, strict=True))
        half = self.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        frequencies = 1.0 / (self.theta**exponents)
        angles = torch.stack([columns, rows], 1)[..., None] * frequencies  # [P, 2, D / 4]
        angles = torch.cat([angles, angles], -1).flatten(1)[:, None]  # [P, 1, D]
        lengths = [height * width for frames, height, width in grids for _ in range(frames)]
        return PatchPositions(
            columns=to_device(columns, device),
            rows=to_device(rows, device),
            cosines=to_device(angles.cos(), device),
            sines=to_device(angles.sin(), device),
            segments=Segments(lengths, device),
        )


def block_positions(grid: Grid, merge: int) -> tuple[Tensor, Tensor]:
    """Returns the columns and the rows [frames * rows * columns] int64 of the patches of an item,
    which come in blocks of merge x merge."""
    frames, height, width = grid
    shape = (height // merge, width // merge, merge, merge)
    rows = torch.arange(height).view(-1, 1, merge, 1).expand(shape)
    columns = torch.arange(width).view(1, -1, 1, merge).expand(shape)
    return columns.flatten().repeat(frames), rows.flatten().repeat(frames)


def rotated(x: Tensor, at: PatchPositions, scale: float = 1.0) -> Tensor:
    """Rotates the heads of `x` [P, H, D] and multiplies them by `scale`, in float32."""
    wide = x.float()
    halves = wide.view(*x.shape[:-1], 2, 2, -1)  # of each half of a head, the two parts of pairs
    first, second = halves.unbind(-2)  # [P, H, 2, D / 4] each
    turned = torch.stack([-second, first], -2).flatten(-3)
    return ((wide * at.cosines + turned * at.sines) * scale).to(x.dtype)
