"""Rotary position embedding: angles once per step, shared by all layers and all heads.

Channel c of a head turns by position[axis(c)] * frequency(c). Two layouts of the channel pairs:
    half-split (Qwen)     (0, D/2) (1, D/2+1) ...
    interleaved (ERNIE)   (0, 1) (2, 3) ...
and one position per token, or one per axis (M-RoPE: time, height, width) with `axes` telling which
axis a channel pair follows.

Shapes: T tokens, N heads, D head size. Angles and rotation are computed in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.forward import HeadTurn

from .norm import RMSNorm
from .rows import row_parts
from .with_kernels import LayerKernels, WithKernels

# Values of a float32 temporary, see rows.py.
MAX_VALUES = 2**18


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """head_dim: D. turned_dim: R, even, the first channels of a head that turn; None: all of them.
    theta: base of the frequencies theta ** (-2 i / R).

    axes: for M-RoPE, the axis (row of the positions) of each of the R / 2 channel pairs.
    frequencies: R / 2 values that replace the ones of theta (scaled variants). scale: factor on the
    rotated vectors, which such variants need.
    """

    head_dim: int
    theta: float = 10000.0
    is_interleaved: bool = False
    axes: tuple[int, ...] | None = None
    frequencies: tuple[float, ...] | None = None
    scale: float = 1.0
    turned_dim: int | None = None

    @property
    def num_pairs(self) -> int:
        """R / 2."""
        return (self.head_dim if self.turned_dim is None else self.turned_dim) // 2


class Rope(ABC):
    """cos and sin of one step's tokens."""

    @abstractmethod
    def rotate(self, x: Tensor) -> Tensor:
        """`x` [T, N, D] with every head turned, same dtype. May write into `x`."""

    def norm_and_rotate(self, x: Tensor, num_q_heads: int, q: RMSNorm, k: RMSNorm) -> Tensor:
        """As `rotate`, of the first heads behind the norm `q` and of the others behind `k`."""
        return self.rotate(torch.cat([q(x[:, :num_q_heads]), k(x[:, num_q_heads:])], 1))


class HalfSplitRope(Rope):
    """Turns the pairs (c, c + D/2)."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: [T, D / 2] float32."""
        self._cos = torch.cat([cos, cos], -1)[:, None]  # [T, 1, D]
        self._sin = torch.cat([-sin, sin], -1)[:, None]  # [T, 1, D]

    def rotate(self, x: Tensor) -> Tensor:
        """See Rope."""
        return _by_parts(x, self._turn)

    def _turn(self, x: Tensor, part: slice) -> Tensor:
        turned = torch.roll(x, x.shape[-1] // 2, -1)
        return turned.mul_(self._sin[part]).addcmul_(x, self._cos[part])


class InterleavedRope(Rope):
    """Turns the pairs (2 c, 2 c + 1): products of complex numbers."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: [T, D / 2] float32."""
        self._unit = torch.complex(cos, sin)[:, None]  # [T, 1, D / 2]

    def rotate(self, x: Tensor) -> Tensor:
        """See Rope."""
        return _by_parts(x, self._turn)

    def _turn(self, x: Tensor, part: slice) -> Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs.mul_(self._unit[part])).flatten(-2)


class PartialRope(Rope):
    """Turns the first `size` channels of every head, and leaves the others."""

    def __init__(self, rope: Rope, size: int) -> None:
        self._rope = rope
        self._size = size

    def rotate(self, x: Tensor) -> Tensor:
        """See Rope."""
        turned = self._rope.rotate(x[..., : self._size])
        return torch.cat([turned, x[..., self._size :]], -1)


class KernelRope(Rope):
    """Either layout, some channels or all of them, in place."""

    def __init__(
        self, cos: Tensor, sin: Tensor, *, is_interleaved: bool, kernels: LayerKernels
    ) -> None:
        """cos, sin: [T, R / 2] float32."""
        self._cos = cos
        self._sin = sin
        self._is_interleaved = is_interleaved
        self._kernels = kernels

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """cos and sin."""
        return self._cos, self._sin

    def with_tables(self, cos: Tensor, sin: Tensor) -> KernelRope:
        """The same for other tokens."""
        return KernelRope(cos, sin, is_interleaved=self._is_interleaved, kernels=self._kernels)

    def turn_of(self, x: Tensor, norms: tuple[RMSNorm, RMSNorm] | None) -> HeadTurn | None:
        """What `rotate`, or norm_and_rotate, is to heads `x` [T, N, D], for attention that does it;
        None where the kernels do not take them."""
        weights = [norm.weight for norm in norms or ()]
        if not self._kernels.takes(x, *weights):
            return None
        q_weight, k_weight = weights or (None, None)
        return HeadTurn(
            cosines=self._cos,
            sines=self._sin,
            is_interleaved=self._is_interleaved,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=norms[0].eps if norms else 0.0,
        )

    def rotate(self, x: Tensor) -> Tensor:
        """See Rope."""
        if not self._kernels.takes(x):
            plain = _plain_rope(
                self._cos, self._sin, is_interleaved=self._is_interleaved, head_dim=x.shape[-1]
            )
            return plain.rotate(x)
        self._kernels.rotate(x, self._cos, self._sin, is_interleaved=self._is_interleaved)
        return x

    def norm_and_rotate(self, x: Tensor, num_q_heads: int, q: RMSNorm, k: RMSNorm) -> Tensor:
        """See Rope."""
        if not self._kernels.takes(x, q.weight, k.weight):
            return super().norm_and_rotate(x, num_q_heads, q, k)
        self._kernels.norm_and_rotate(
            x,
            q.weight,
            k.weight,
            num_q_heads,
            q.eps,
            self._cos,
            self._sin,
            is_interleaved=self._is_interleaved,
        )
        return x


def _plain_rope(cos: Tensor, sin: Tensor, *, is_interleaved: bool, head_dim: int) -> Rope:
    """In plain torch."""
    rope: Rope = (InterleavedRope if is_interleaved else HalfSplitRope)(cos, sin)
    size = 2 * cos.shape[-1]
    return rope if size == head_dim else PartialRope(rope, size)


def _by_parts(x: Tensor, turn: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """turn(rows of `x` in float32, which rows), in `x`'s dtype again."""
    rows = row_parts(x, x.shape[1] * x.shape[2], MAX_VALUES)
    if len(rows) == 1:
        return turn(x.float(), rows[0]).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for part in rows:
        out[part] = turn(x[part].float(), part)
    return out


class Rotary(WithKernels):
    """Positions -> Rope."""

    frequencies: Tensor
    axes: Tensor | None

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.config = config
        num_pairs = config.num_pairs
        self.register_buffer("frequencies", torch.empty(num_pairs), persistent=False)
        axes = None if config.axes is None else torch.empty(num_pairs, dtype=torch.int64)
        self.register_buffer("axes", axes, persistent=False)

    def init_buffers(self, device: torch.device) -> None:
        """Computes the frequencies on the CPU, so that they are the same on every device."""
        config = self.config
        own = config.frequencies
        values = base_frequencies(2 * config.num_pairs, config.theta) if own is None else own
        self.frequencies = torch.as_tensor(values, dtype=torch.float32, device="cpu").to(device)
        if config.axes is not None:
            self.axes = torch.tensor(config.axes, device="cpu").to(device)

    def forward(self, positions: Tensor) -> Rope:
        """positions: [T], or [axes, T] for M-RoPE; integers."""
        if self.axes is None:
            per_pair = positions[:, None].float()
        else:
            per_pair = positions[self.axes].T.float().contiguous()
        angles = per_pair * self.frequencies  # [T, R / 2]
        cos, sin = angles.cos(), angles.sin()
        if self.config.scale != 1.0:
            cos, sin = cos * self.config.scale, sin * self.config.scale
        is_interleaved = self.config.is_interleaved
        if self.kernels is not None:
            return KernelRope(cos, sin, is_interleaved=is_interleaved, kernels=self.kernels)
        head_dim = self.config.head_dim
        return _plain_rope(cos, sin, is_interleaved=is_interleaved, head_dim=head_dim)


def base_frequencies(size: int, theta: float) -> Tensor:
    """theta ** (-2 i / size) for i in 0 .. size / 2, float32, on the CPU."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    return 1.0 / (theta**exponents)


def sectioned_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Qwen's M-RoPE: the first sections[0] pairs follow time, then height, then width."""
    return tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))


def alternating_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """ERNIE's M-RoPE, sections being (height, width, time): height and width take turns, then
    time."""
    height, width, time = sections
    if height != width:
        raise ValueError(f"height and width must have equally many channels, got {list(sections)}")
    return (1, 2) * height + (0,) * time
