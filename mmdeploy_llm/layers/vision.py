"""Building blocks of vision transformers: patches of many images of any size, concatenated.

A grid (t, h, w) is t frames of h x w patches; patches come in merge x merge blocks, row by row of
blocks, as the processors write them. Attention never crosses segments (frames or windows); in plain
torch segments of equal length share one call.

Shapes: P patches of all images, H heads, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks.objects.attention import VisibleKeys
from mmdeploy_llm.kernels import TORCH, Kernels
from mmdeploy_llm.kernels.plain import ACTIVATIONS
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import Linear, MergedLinear, empty_parameter
from mmdeploy_llm.layers.basic.mlp import MLP
from mmdeploy_llm.layers.basic.norm import LayerNorm, RMSNorm
from mmdeploy_llm.layers.basic.rotary import Rope, Rotary, RotaryConfig, base_frequencies
from mmdeploy_llm.layers.transfer import to_device

Grid = tuple[int, int, int]
MAX_VARLEN_HEAD_DIM = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentGroup:
    """A group of `num` segments of `length` patches each. rows: indices of their patches,
    [num * length]; None when they are contiguous from `start` on."""

    num: int
    length: int
    start: int = 0
    rows: Tensor | None = None


class Segments:
    """Consecutive runs of patches that attend to each other."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """lengths: patches of each segment, in order; they add up to P."""
        self._sizes = torch.tensor(lengths)
        self._device = device

    @cached_property
    def groups(self) -> tuple[SegmentGroup, ...]:
        """Segments grouped by length, for attention in plain torch."""
        starts = self._sizes.cumsum(0) - self._sizes
        return tuple(
            _group(starts[self._sizes == length], length, self._device)
            for length in sorted(set(self._sizes.tolist()))
        )

    @cached_property
    def visible(self) -> VisibleKeys:
        """The keys that each patch attends to, for the kernels: all of its segment."""
        ends = self._sizes.repeat_interleave(self._sizes)
        return VisibleKeys(
            query_starts=F.pad(self._sizes.cumsum(0), (1, 0)),
            first_visible=torch.zeros_like(ends),
            end_visible=ends,
        )

    @cached_property
    def starts(self) -> Tensor:
        """Index of the first patch of each of S segments, followed by P: [S + 1] int32 on the
        device."""
        return to_device(F.pad(self._sizes.cumsum(0), (1, 0)).int(), self._device)

    @cached_property
    def longest(self) -> int:
        """Patches in the largest segment."""
        return int(self._sizes.max())

    def attend(self, q: Tensor, k: Tensor, v: Tensor, kernels: Kernels = TORCH) -> Tensor:
        """Computes full attention within each segment, [P, H, D] -> [P, H, D]: by kernels if they
        can, on CUDA in 16 bits by one call of torch's flash-attention, else group by group."""
        own = kernels.attention
        if own is not None and own.can_attend(q, k, v):
            return own.attend(q, k, v, self.visible, scale=q.shape[-1] ** -0.5)
        if _takes_varlen(q):
            return _attend_varlen(q, k, v, self.starts, self.longest)
        if len(self.groups) == 1 and self.groups[0].rows is None:
            return _attend(self.groups[0], q, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in self.groups:
            attended = _attend(group, q, k, v)
            if group.rows is None:
                out[group.start : group.start + attended.shape[0]] = attended
            else:
                out.index_copy_(0, group.rows, attended)
        return out


def _takes_varlen(q: Tensor) -> bool:
    """Whether torch's flash-attention supports heads like these, in segments of any lengths."""
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return False
    head_dim = q.shape[-1]
    is_ampere = torch.cuda.get_device_capability(q.device) >= (8, 0)
    return is_ampere and head_dim % 8 == 0 and head_dim <= MAX_VARLEN_HEAD_DIM


def _attend_varlen(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Computes full attention of [P, H, D] within each segment, from one of `starts` to the
    next."""
    from torch.nn.attention.varlen import varlen_attn  # the import takes seconds

    return cast(Tensor, varlen_attn(q, k, v, starts, starts, longest, longest))


def _group(starts: Tensor, length: int, device: torch.device) -> SegmentGroup:
    """Groups the segments of one length. starts: their first patches, ascending."""
    rows = (starts[:, None] + torch.arange(length)).flatten()
    num, first = starts.numel(), int(rows[0])
    if torch.equal(rows, torch.arange(first, first + rows.numel())):
        return SegmentGroup(num=num, length=length, start=first)
    return SegmentGroup(num=num, length=length, rows=to_device(rows, device))


def _attend(group: SegmentGroup, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends within the segments of a group: [P, H, D] -> its patches [num * length, H, D]."""
    shape = (group.num, group.length, *q.shape[1:])
    rows = slice(group.start, group.start + group.num * group.length)
    q, k, v = (
        (x[rows] if group.rows is None else x.index_select(0, group.rows)).reshape(shape)
        for x in (q, k, v)
    )
    out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).flatten(0, 1)


class PatchEmbed(nn.Module):
    """Embeds the pixels of a patch: a convolution whose stride is its kernel size."""

    def __init__(self, size: int, patch_shape: Sequence[int], *, bias: bool = False) -> None:
        """patch_shape: trailing axes of the checkpoint's weight, (channels, time, height, width) or
        their product."""
        super().__init__()
        self.proj = _PatchProjection(size, patch_shape, bias=bias)

    def forward(self, pixels: Tensor) -> Tensor:
        """Embeds [P, patch_dim] -> [P, size], in the weight's dtype."""
        out: Tensor = self.proj(pixels.to(self.proj.weight.dtype))
        return out


class _PatchProjection(Linear):
    is_exact = True  # pixels are rounded to 8 bits already

    def __init__(self, size: int, patch_shape: Sequence[int], *, bias: bool) -> None:
        super().__init__(math.prod(patch_shape), size, bias=bias)
        self.weight = empty_parameter(size, *patch_shape)


class PositionTable(nn.Module):
    """Learned embeddings on a square grid, resampled to a grid of any size."""

    def __init__(
        self,
        num_cells: int,
        size: int,
        *,
        align_corners: bool,
        mode: Literal["bilinear", "bicubic"] = "bilinear",
        antialias: bool = False,
    ) -> None:
        """num_cells: a square number. align_corners, mode, antialias: see torch's interpolate;
        with other than their defaults the last two compute in float32."""
        super().__init__()
        self.side = math.isqrt(num_cells)
        self.is_wide = antialias or mode != "bilinear"
        self.resample = partial(
            F.interpolate, mode=mode, align_corners=align_corners, antialias=antialias
        )
        self.weight = empty_parameter(num_cells, size)

    def forward(self, grids: Sequence[Grid], merge: int) -> Tensor:
        """Returns the embeddings of all patches, [P, size], in the patches' order."""
        weight = self.weight.float() if self.is_wide else self.weight
        table = weight.view(self.side, self.side, -1).permute(2, 0, 1)[None]
        out = torch.cat([self._resampled(table, grid, merge) for grid in grids])
        return out.to(self.weight.dtype)

    def _resampled(self, table: Tensor, grid: Grid, merge: int) -> Tensor:
        frames, height, width = grid
        if width > 1:
            cells = self.resample(table, (height, width))
        else:  # torch's antialiasing is right for a single row, and wrong for a single column
            cells = self.resample(table.mT, (1, height)).mT
        blocks = cells.view(-1, height // merge, merge, width // merge, merge)
        return blocks.permute(1, 3, 2, 4, 0).reshape(height * width, -1).repeat(frames, 1)


class VisionAttention(KernelLayer):
    """Multi-head attention within segments. A checkpoint may have one qkv weight, or q_proj, k_proj
    and v_proj."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        out_bias: bool = True,
        qk_norm_eps: float | None = None,
    ) -> None:
        """qk_norm_eps: of norms over each head of query and key; None: there are none."""
        super().__init__()
        self.num_heads = num_heads
        parts = {"q_proj": size, "k_proj": size, "v_proj": size}
        self.qkv = MergedLinear(size, parts, bias=qkv_bias)
        self.proj = Linear(size, size, bias=out_bias)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm, self.k_norm = (RMSNorm(size // num_heads, qk_norm_eps) for _ in range(2))

    def forward(self, x: Tensor, segments: Segments, rope: Rope) -> Tensor:
        """Computes attention with its projections, [P, size] -> [P, size]."""
        qkv = self.qkv(x).view(x.shape[0], 3 * self.num_heads, -1)
        qk = qkv[:, : 2 * self.num_heads]
        if self.q_norm is None or self.k_norm is None:
            qk = rope.rotate(qk)
        else:
            qk = rope.norm_and_rotate(qk, self.num_heads, self.q_norm, self.k_norm)
        q, k = qk[:, : self.num_heads], qk[:, self.num_heads :]
        v = qkv[:, 2 * self.num_heads :]
        out: Tensor = self.proj(segments.attend(q, k, v, self.kernels).flatten(1))
        return out


class VisionBlock(nn.Module):
    """Attention and MLP, each after its norm. norm: builds a norm. mlp: [P, size] -> [P, size].
    attn: None: VisionAttention with biases and without norms."""

    def __init__(
        self,
        size: int,
        num_heads: int,
        *,
        norm: Callable[[], nn.Module],
        mlp: nn.Module,
        attn: VisionAttention | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = norm()
        self.attn = attn or VisionAttention(size, num_heads)
        self.norm2 = norm()
        self.mlp = mlp

    def forward(self, x: Tensor, segments: Segments, rope: Rope) -> Tensor:
        """Computes the block, [P, size] -> [P, size], in the memory of `x`."""
        x = x.add_(self.attn(self.norm1(x), segments, rope))
        return x.add_(self.mlp(self.norm2(x)))


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Sizes and options of a VisionEncoder.

    patch_shape: see PatchEmbed.
    activation: transformers' name.
    theta: base of the rotary frequencies.
    merge_size: patches along each side of a block.
    num_positions, align_corners: see PositionTable; num_positions None: there is no table.
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
    """Computes patch features [P, size] from the pixels [P, patch_dim] of all grids, by layers with
    LayerNorm and a plain MLP. Attention covers a whole frame, never several frames."""

    def __init__(self, config: VisionConfig) -> None:
        """Builds the layers. Raises ModelNotSupportedError for an unknown activation."""
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
        """Yields [P, size] after each layer, in the order of the pixels; the next layer overwrites
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
        """Returns [P, size] after the last layer."""
        *_, last = self.states(pixels, grids)
        return last


def vision_activation(name: str) -> Callable[[Tensor], Tensor]:
    """Looks up an activation by transformers' name. Raises ModelNotSupportedError if unknown."""
    for known, function in ACTIVATIONS.items():
        if name == known:
            return function
    raise ModelNotSupportedError(
        f"hidden_act {name!r} of the vision tower is not supported, only {', '.join(ACTIVATIONS)}"
    )


def vision_theta(config: Any) -> float:
    """Returns the base of the rotary frequencies in a vision tower's config."""
    return float((getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0))


def axial_rotary(head_dim: int, theta: float) -> RotaryConfig:
    """Returns a 2D rotary embedding: half of a head's channel pairs follow the row, half the
    column, with the same frequencies."""
    frequencies = tuple(base_frequencies(head_dim // 2, theta).tolist())
    num = len(frequencies)
    return RotaryConfig(
        head_dim=head_dim, axes=(0,) * num + (1,) * num, frequencies=frequencies * 2
    )


def patch_positions(grids: Sequence[Grid], merge: int, device: torch.device) -> Tensor:
    """Returns row and column of every patch in its frame, [2, P] int64, in the patches' order."""
    return to_device(torch.cat([_grid_positions(*grid, merge) for grid in grids], 1), device)


def _grid_positions(num_frames: int, height: int, width: int, merge: int) -> Tensor:
    cells = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"))
    blocks = cells.view(2, height // merge, merge, width // merge, merge).transpose(2, 3)
    return blocks.reshape(2, -1).repeat(1, num_frames)


def frame_lengths(grids: Sequence[Grid]) -> list[int]:
    """Returns the number of patches in every frame of every grid."""
    return [height * width for frames, height, width in grids for _ in range(frames)]


def grid_positions(
    num_tokens: int, media: Sequence[tuple[int, Grid, float]], device: torch.device | None = None
) -> Tensor:
    """Returns M-RoPE positions of a prompt, [3, num_tokens] int64 (time, height, width).

    media: for each item its first token, its grid of tokens (after merging) and the positions
        between two frames; sorted by first token.

    A media item advances the position by the larger of its height and width, whatever its length in
    time; text continues there.
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
