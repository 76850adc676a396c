"""Vision transformer parts: patches of many images of any size, one behind the other.

A grid (t, h, w) is t frames of h x w patches; patches come in merge x merge blocks, row by row of
blocks, as the processors write them. Attention never crosses segments (frames or windows); segments
of equal length share one call.

Shapes: P patches of all images, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isqrt
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.native import Kernels, Sequences
from mmdeploy_llm.transfer import to_device

from .linear import Linear, MergedLinear, empty_parameter
from .mlp import MLP, quick_gelu
from .norm import LayerNorm
from .rotary import Rope, Rotary, RotaryConfig, base_frequencies
from .with_kernels import WithKernels

Grid = tuple[int, int, int]
MAX_VARLEN_HEAD_DIM = 256
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "quick_gelu": quick_gelu,
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentGroup:
    """`num` segments of `length` patches. rows: their patches, [num * length], or None when these
    simply start at `start`."""

    num: int
    length: int
    start: int = 0
    rows: Tensor | None = None


class Segments:
    """Which patches attend to each other."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """lengths: of the segments, in the order of the patches; they add up to P."""
        self._sizes = torch.tensor(lengths)
        self._device = device

    @cached_property
    def groups(self) -> tuple[SegmentGroup, ...]:
        """Segments of equal length, for attention in plain torch."""
        starts = self._sizes.cumsum(0) - self._sizes
        return tuple(
            _group(starts[self._sizes == length], length, self._device)
            for length in sorted(set(self._sizes.tolist()))
        )

    @cached_property
    def sequences(self) -> Sequences:
        """What each patch sees, for the kernels."""
        behind = self._sizes.repeat_interleave(self._sizes)
        return Sequences(
            query_starts=F.pad(self._sizes.cumsum(0), (1, 0)),
            first_seen=torch.zeros_like(behind),
            behind_seen=behind,
        )

    @cached_property
    def starts(self) -> Tensor:
        """The first patch of each segment, and the end: [S + 1] int32 on the device."""
        return to_device(F.pad(self._sizes.cumsum(0), (1, 0)).int(), self._device)

    @cached_property
    def longest(self) -> int:
        """Patches of the largest segment."""
        return int(self._sizes.max())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernels: Kernels | None = None) -> Tensor:
        """Full attention within each segment: [P, H, D] -> [P, H, D]. kernels: compute it where
        they take the tensors. On CUDA in 16 bits one call of flash-attention, as torch has it."""
        if kernels is not None and kernels.can_attend(q, k, v):
            return kernels.attend(q, k, v, self.sequences, scale=q.shape[-1] ** -0.5)
        if _takes_varlen(q):
            return _attend_varlen(q, k, v, self.starts, self.longest)
        if len(self.groups) == 1 and self.groups[0].rows is None:
            return _attend(self.groups[0], q, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self.groups:
            part = _attend(group, q, k, v)
            if group.rows is None:
                out[group.start : group.start + part.shape[0]] = part
            else:
                out.index_copy_(0, group.rows, part)
        return out


def _takes_varlen(q: Tensor) -> bool:
    """Whether torch's flash-attention computes segments of any lengths in one call."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    head_dim = q.shape[-1]
    is_ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return is_ampere and head_dim % 8 == 0 and head_dim <= MAX_VARLEN_HEAD_DIM


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Full attention of [P, H, D] between each of `starts` and the next."""
    from torch.nn.attention.varlen import varlen_attn  # seconds, which others need not spend

    return cast(Tensor, varlen_attn(q, k, v, starts, starts, longest, longest))


def _group(starts: Tensor, length: int, device: torch.device) -> SegmentGroup:
    """starts: of all segments of this length, ascending."""
    rows = (starts[:, None] + torch.arange(length)).flatten()
    num, first = starts.numel(), int(rows[0])
    if torch.equal(rows, torch.arange(first, first + rows.numel())):
        return SegmentGroup(num=num, length=length, start=first)
    return SegmentGroup(num=num, length=length, rows=to_device(rows, device))


def _attend(group: SegmentGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[P, H, D] -> the group's patches [num * length, H, D]."""
    shape = (group.num, group.length, *q.shape[1:])
    rows = slice(group.start, group.start + group.num * group.length)
    q, k, v = (
        (x[rows] if group.rows is None else x.index_select(0, group.rows)).reshape(shape)
        for x in (q, k, v)
    )
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(0, 1)


class PatchEmbed(nn.Module):
    """Pixels of a patch -> its embedding: a convolution whose stride is its kernel."""

    def __init__(self, size: int, patch_shape: Sequence[int], *, bias: bool = False) -> None:
        """patch_shape: trailing axes of the checkpoint's weight, (channels, time, height, width) or
        flat."""
        super().__init__()
        self.proj = _PatchProjection(size, patch_shape, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, patch_dim] -> [P, size], in the weight's dtype."""
        out: Tensor = self.proj(pixels.to(self.proj.weight.dtype))
        return out


class _PatchProjection(nn.Module):
    def __init__(self, size: int, patch_shape: Sequence[int], *, bias: bool) -> None:
        super().__init__()
        self.weight = empty_parameter(size, *patch_shape)
        self.bias = empty_parameter(size) if bias else None

    def forward(self, pixels: Tensor) -> Tensor:
        return F.linear(pixels, self.weight.flatten(1), self.bias)


class PositionTable(nn.Module):
    """A learned embedding for each cell of a square, resampled bilinearly to a grid of any size."""

    def __init__(self, num_cells: int, size: int, *, align_corners: bool) -> None:
        """num_cells: a square number. align_corners: as torch's interpolate."""
        super().__init__()
        self.side = isqrt(num_cells)
        self.align_corners = align_corners
        self.weight = empty_parameter(num_cells, size)

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        """[P, size] of all patches, in the patches' order."""
        table = self.weight.view(self.side, self.side, -1).permute(2, 0, 1)[None]
        return torch.cat([self._of_grid(table, grid, merge) for grid in grids])

    def _of_grid(self, table: Tensor, grid: Grid, merge: int) -> Tensor:
        frames, height, width = grid
        cells = F.interpolate(
            table, (height, width), mode="bilinear", align_corners=self.align_corners
        )
        blocks = cells.view(-1, height // merge, merge, width // merge, merge)
        return blocks.permute(1, 3, 2, 4, 0).reshape(height * width, -1).repeat(frames, 1)


class VisionAttention(WithKernels):
    """Multi-head attention within segments. Checkpoints may hold qkv in one or as q_proj, k_proj
    and v_proj."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        parts = {"q_proj": size, "k_proj": size, "v_proj": size}
        self.qkv = MergedLinear(size, parts, bias=True)
        self.proj = Linear(size, size, bias=True)

    def forward(self, x: Tensor, segments: Segments, rope: Rope) -> Tensor:
        """[P, size] -> [P, size]."""
        qkv = self.qkv(x).view(x.shape[0], 3 * self.num_heads, -1)
        turned = rope.rotate(qkv[:, : 2 * self.num_heads])
        q, k = turned[:, : self.num_heads], turned[:, self.num_heads :]
        v = qkv[:, 2 * self.num_heads :]
        kernels = self.kernels if isinstance(self.kernels, Kernels) else None
        out: Tensor = self.proj(segments.attend(q, k, v, kernels).flatten(1))
        return out


class VisionBlock(nn.Module):
    """Attention and MLP, each behind its norm. norm: builds one. mlp: [P, size] -> [P, size]."""

    def __init__(
        self, size: int, num_heads: int, *, norm: Callable[[], nn.Module], mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1 = norm()
        self.attn = VisionAttention(size, num_heads)
        self.norm2 = norm()
        self.mlp = mlp

    def forward(self, x: Tensor, segments: Segments, rope: Rope) -> Tensor:
        """[P, size] -> the same, written into `x`."""
        x = x.add_(self.attn(self.norm1(x), segments, rope))
        return x.add_(self.mlp(self.norm2(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Sizes and options of a VisionEncoder.

    patch_shape: see PatchEmbed. activation: transformers' name. theta: base of the rotary
    frequencies. merge_size: patches of a block on each side, in the order in which they come.
    num_positions: cells of a learned position table, None without one; align_corners: see there.
    """

    size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    patch_shape: Sequence[int]
    norm_eps: float
    activation: str
    theta: float
    merge_size: int
    patch_bias: bool = False
    num_positions: int | None = None
    align_corners: bool = False


class VisionEncoder(nn.Module):
    """Pixels [P, patch_dim] of all grids -> patch features [P, size]: layers with LayerNorm and a
    plain MLP whose attention covers whole frames. Frames do not see each other."""

    def __init__(self, config: VisionConfig) -> None:
        """Raises ModelNotSupportedError for an unknown activation."""
        super().__init__()
        size, activation = config.size, vision_activation(config.activation)
        norm = partial(LayerNorm, size, config.norm_eps)
        self.merge_size = config.merge_size
        self.patch_embed = PatchEmbed(size, config.patch_shape, bias=config.patch_bias)
        self.pos_embed = None
        if config.num_positions is not None:
            self.pos_embed = PositionTable(
                config.num_positions, size, align_corners=config.align_corners
            )
        self.rotary = Rotary(axial_rotary(size // config.num_heads, config.theta))
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                config.num_heads,
                norm=norm,
                mlp=MLP(size, config.intermediate_size, size, activation),
            )
            for _ in range(config.num_layers)
        )

    def states(self, pixels: Tensor, grids: Sequence[Grid]) -> Iterator[Tensor]:
        """[P, size] behind each layer, in the order of the pixels; the next one is written over
        it."""
        x = self.patch_embed(pixels)
        if self.pos_embed is not None:
            x = x.add_(self.pos_embed(grids, self.merge_size))
        rope = self.rotary(patch_positions(grids, self.merge_size, x.device))
        segments = Segments(frame_lengths(grids), x.device)
        for block in self.blocks:
            x = block(x, segments, rope)
            yield x

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Behind the last layer."""
        *_, last = self.states(pixels, grids)
        return last


def vision_activation(name: str) -> Callable[[Tensor], Tensor]:
    """By transformers' name. Raises ModelNotSupportedError for an unknown one."""
    if name not in ACTIVATIONS:
        raise ModelNotSupportedError(
            f"hidden_act {name!r} of the vision tower is not supported, only "
            f"{', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def vision_theta(config: Any) -> float:
    """Base of the rotary frequencies of a vision tower's config."""
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))


def axial_rotary(head_dim: int, theta: float) -> RotaryConfig:
    """Half of a head's channel pairs follow the row, half the column, at the same frequencies."""
    frequencies = tuple(base_frequencies(head_dim // 2, theta).tolist())
    num = len(frequencies)
    return RotaryConfig(
        head_dim=head_dim, axes=(0,) * num + (1,) * num, frequencies=frequencies * 2
    )


def patch_positions(grids: Sequence[Grid], merge: int, device: torch.device) -> Tensor:
    """Row and column of every patch in its frame, [2, P] int64, in the patches' order."""
    return to_device(torch.cat([_grid_positions(*grid, merge) for grid in grids], 1), device)


def _grid_positions(num_frames: int, height: int, width: int, merge: int) -> Tensor:
    cells = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    blocks = cells.view(2, height // merge, merge, width // merge, merge).transpose(2, 3)
    return blocks.reshape(2, -1).repeat(1, num_frames)


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Patches of every frame of every grid."""
    return [height * width for frames, height, width in grids for _ in range(frames)]


def grid_positions(
    num_tokens: int, media: Sequence[tuple[int, Grid, float]], device: torch.device | None = None
) -> Tensor:
    """M-RoPE positions of a prompt, [3, num_tokens] int64 (time, height, width).

    media: offset of the first token, grid of tokens (after merging) and time between frames (in
    positions), by offset. Text continues at 1 + the extent of what came before: a media item
    advances by the larger of its height and width, whatever its length in time.
    """
    out = torch.empty(3, num_tokens, dtype=torch.int64)
    done, position = 0, 0
    for offset, (frames, height, width), interval in media:
        out[:, done:offset] = torch.arange(position, position + offset - done)
        position += offset - done
        done = offset + frames * height * width
        times = (torch.arange(frames) * interval).long()
        axes = torch.meshgrid(times, torch.arange(height), torch.arange(width), indexing="ij")
        out[:, offset:done] = torch.stack(axes).view(3, -1) + position
        position += max(height, width)
    out[:, done:] = torch.arange(position, position + num_tokens - done)
    return out.to(device)
