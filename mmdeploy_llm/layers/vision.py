"""Vision transformer parts: patches of many images of any size, one behind the other.

A grid (t, h, w) is t frames of h x w patches; patches come in merge x merge blocks, row by row of
blocks, as the processors write them. Attention never crosses segments (frames or windows); segments
of equal length share one call.

Shapes: P patches of all images, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .linear import Linear
from .rotary import Rope, RotaryConfig, base_frequencies

Grid = tuple[int, int, int]


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

    def __init__(
        self, lengths: Sequence[int], device: torch.device, places: Tensor | None = None
    ) -> None:
        """lengths: of the segments, in the order of the patches; they add up to P. places: [P] on
        the CPU, where each patch lies now, for patches that were reordered."""
        sizes = torch.tensor(lengths)
        starts = sizes.cumsum(0) - sizes
        self.groups = tuple(
            _group(starts[sizes == length], length, places, device)
            for length in sorted(set(lengths))
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Full attention within each segment: [P, H, D] -> [P, H, D]."""
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


def _group(
    starts: Tensor, length: int, places: Tensor | None, device: torch.device
) -> SegmentGroup:
    """starts: of all segments of this length, ascending."""
    rows = starts[:, None] + torch.arange(length)
    if places is not None:
        rows = places[rows].sort(-1).values  # attention does not depend on the order in a segment
    rows = rows.flatten()
    num, first = starts.numel(), int(rows[0])
    if torch.equal(rows, torch.arange(first, first + rows.numel())):
        return SegmentGroup(num=num, length=length, start=first)
    return SegmentGroup(num=num, length=length, rows=rows.to(device))


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

    def __init__(self, size: int, patch_shape: Sequence[int]) -> None:
        """patch_shape: trailing axes of the checkpoint's weight, (channels, time, height, width) or
        flat."""
        super().__init__()
        self.proj = nn.Module()
        self.proj.weight = nn.Parameter(torch.empty(size, *patch_shape), requires_grad=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """[P, patch_dim] -> [P, size], in the weight's dtype."""
        weight = self.proj.weight
        assert isinstance(weight, Tensor)
        return F.linear(pixels.to(weight.dtype), weight.flatten(1))


class VisionAttention(nn.Module):
    """Multi-head attention within segments."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(size, 3 * size, bias=True)
        self.proj = Linear(size, size, bias=True)

    def forward(self, x: Tensor, segments: Segments, rope: Rope) -> Tensor:
        """[P, size] -> [P, size]."""
        qkv = self.qkv(x).view(x.shape[0], 3 * self.num_heads, -1)
        turned = rope.rotate(qkv[:, : 2 * self.num_heads])
        q, k = turned[:, : self.num_heads], turned[:, self.num_heads :]
        v = qkv[:, 2 * self.num_heads :]
        out: Tensor = self.proj(segments.attend(q, k, v).flatten(1))
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


def axial_rotary(head_dim: int, theta: float) -> RotaryConfig:
    """Half of a head's channel pairs follow the row, half the column, at the same frequencies."""
    frequencies = tuple(base_frequencies(head_dim // 2, theta).tolist())
    num = len(frequencies)
    return RotaryConfig(
        head_dim=head_dim, axes=(0,) * num + (1,) * num, frequencies=frequencies * 2
    )


def patch_positions(grids: Sequence[Grid], merge: int, device: torch.device) -> Tensor:
    """Row and column of every patch in its frame, [2, P] int64, in the patches' order."""
    return torch.cat([_grid_positions(*grid, merge) for grid in grids], 1).to(device)


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
