"""Rotary position embedding: angles once per step, shared by all layers and all heads.

Channel pair c of a head is rotated by the angle position[axis(c)] * frequency(c). Pairs have one of
two layouts:
    half-split      (0, D/2) (1, D/2+1) ...
    interleaved     (0, 1) (2, 3) ...
A token has one position, or one per axis (M-RoPE: time, height, width); `axes` then names the axis
of each channel pair.

Shapes: T tokens, N heads, D head size, R rotary channels of a head. Angles and rotation are
computed in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.forward import QKRotary
from mmdeploy_llm.kernels import Kernels
from mmdeploy_llm.kernels.states import NormKernels

from .kernel_layer import KernelLayer, row_chunks
from .norm import RMSNorm, heads_normed

# Values in a float32 temporary; see row_chunks.
MAX_VALUES = 2**18
NUM_AXES = 3  # of positions: time, height, width


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryConfig:
    """Options of a Rotary.

    head_dim: channels of a head, D.
    theta: base of the frequencies theta ** (-2 i / R).
    is_interleaved: layout of the channel pairs.
    axes: for M-RoPE, the axis (row of the positions) of each of the R / 2 channel pairs.
    frequencies: R / 2 values that replace those of theta (scaled variants).
    long_frequencies: R / 2 values for sequences of more than long_after tokens (longrope); the
        model must have an attribute `long_after`, as CausalLM has.
    scale: factor on the rotated vectors (scaled variants).
    rotary_dim: R, even: the first R channels of a head are rotated; None: all of them.
    """

    head_dim: int
    theta: float = 10000.0
    is_interleaved: bool = False
    axes: tuple[int, ...] | None = None
    frequencies: tuple[float, ...] | None = None
    scale: float = 1.0
    rotary_dim: int | None = None
    long_frequencies: tuple[float, ...] | None = None
    long_after: int | None = None

    def __post_init__(self) -> None:
        """Raises CheckpointError unless each pair has a frequency and an axis: kernels read them
        without looking."""
        for name in ("axes", "frequencies", "long_frequencies"):
            values = getattr(self, name)
            if values is not None and len(values) != self.num_pairs:
                raise CheckpointError(
                    f"config.json describes a rotary embedding with {name} for {len(values)} pairs "
                    f"of channels (mrope_section, long_factor); heads of {self.head_dim} channels "
                    f"rotate {self.num_pairs} pairs"
                )
        if self.axes and not set(self.axes) <= set(range(NUM_AXES)):
            raise CheckpointError(
                f"config.json has an mrope_section of more than {NUM_AXES} axes; allowed are time, "
                "height and width"
            )

    @property
    def num_pairs(self) -> int:
        """Number of channel pairs that are rotated, R / 2."""
        return (self.head_dim if self.rotary_dim is None else self.rotary_dim) // 2


class Rope(ABC):
    """Rotates heads by the cos and sin of one step's positions."""

    @abstractmethod
    def rotate(self, x: Tensor) -> Tensor:
        """Returns `x` [T, N, D] with every head rotated, in the same dtype. May write into `x`."""

    def norm_and_rotate(self, x: Tensor, num_q_heads: int, q: RMSNorm, k: RMSNorm) -> Tensor:
        """Norms the first num_q_heads heads with `q` and the others with `k`, then rotates as
        `rotate` does."""
        return self.rotate(torch.cat([q(x[:, :num_q_heads]), k(x[:, num_q_heads:])], 1))

    def norm_and_rotate_apart(
        self, q: Tensor, k: Tensor, q_norm: RMSNorm, k_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Returns `q` [T, H, D] and `k` [T, K, D], which need not be adjacent in memory, normed and
        rotated."""
        num_q_heads = q.shape[1]
        qk = self.norm_and_rotate(torch.cat([q, k], 1), num_q_heads, q_norm, k_norm)
        return qk[:, :num_q_heads], qk[:, num_q_heads:]

    def qk_rotary(self, x: Tensor, norms: tuple[RMSNorm, RMSNorm] | None) -> QKRotary | None:
        """Returns the arguments with which attention norms and rotates the heads of `x` [T, N, D]
        itself; None if it cannot, as in this base class."""
        del x, norms
        return None


class NoRope(Rope):
    """Leaves heads unrotated: the rope of layers without rotary embedding."""

    def rotate(self, x: Tensor) -> Tensor:
        """Returns `x`."""
        return x

    def norm_and_rotate(self, x: Tensor, num_q_heads: int, q: RMSNorm, k: RMSNorm) -> Tensor:
        """Norms the heads, with kernels in the memory of `x`."""
        parts = heads_normed(q, x[:, :num_q_heads]), heads_normed(k, x[:, num_q_heads:])
        return x if parts[0].data_ptr() == x.data_ptr() else torch.cat(parts, 1)


class HalfSplitRope(Rope):
    """Rotates the pairs (c, c + D/2)."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: [T, D / 2] float32."""
        self._cos = torch.cat([cos, cos], -1)[:, None]  # [T, 1, D]
        self._sin = torch.cat([-sin, sin], -1)[:, None]  # [T, 1, D]

    def rotate(self, x: Tensor) -> Tensor:
        """Returns the rotated heads; see Rope."""
        return _by_chunks(x, self._rotate)

    def _rotate(self, x: Tensor, rows: slice) -> Tensor:
        rolled = torch.roll(x, x.shape[-1] // 2, -1)
        return rolled.mul_(self._sin[rows]).addcmul_(x, self._cos[rows])


class InterleavedRope(Rope):
    """Rotates the pairs (2 c, 2 c + 1), as products of complex numbers."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        """cos, sin: [T, D / 2] float32."""
        self._unit = torch.complex(cos, sin)[:, None]  # [T, 1, D / 2]

    def rotate(self, x: Tensor) -> Tensor:
        """Returns the rotated heads; see Rope."""
        return _by_chunks(x, self._rotate)

    def _rotate(self, x: Tensor, rows: slice) -> Tensor:
        pairs = torch.view_as_complex(x.view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs.mul_(self._unit[rows])).flatten(-2)


class PartialRope(Rope):
    """Rotates the first `size` channels of every head, and leaves the others unchanged."""

    def __init__(self, rope: Rope, size: int) -> None:
        self._rope = rope
        self._size = size

    def rotate(self, x: Tensor) -> Tensor:
        """Returns heads whose first channels are rotated; see Rope."""
        rotated = self._rope.rotate(x[..., : self._size])
        return torch.cat([rotated, x[..., self._size :]], -1)


class KernelRope(Rope):
    """Rotates in place with kernels: either layout, the first R channels or all of them."""

    def __init__(self, cos: Tensor, sin: Tensor, *, is_interleaved: bool, kernels: Kernels) -> None:
        """cos, sin: [T, R / 2] float32."""
        self._cos = cos
        self._sin = sin
        self._is_interleaved = is_interleaved
        self._kernels = kernels

    def qk_rotary(self, x: Tensor, norms: tuple[RMSNorm, RMSNorm] | None) -> QKRotary | None:
        """Returns this rope as data for attention's kernel; None if the kernels do not accept
        `x`."""
        weights = [norm.weight for norm in norms or ()]
        if any(norm.centre is not None for norm in norms or ()):
            return None
        if not self._kernels.takes(x, *weights):
            return None
        q_weight, k_weight = weights or (None, None)
        return QKRotary(
            cosines=self._cos,
            sines=self._sin,
            is_interleaved=self._is_interleaved,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=norms[0].eps if norms else 0.0,
        )

    def rotate(self, x: Tensor) -> Tensor:
        """Rotates in place, or in plain torch if the kernels do not accept `x`; see Rope."""
        if not self._kernels.takes(x):
            plain = _plain_rope(
                self._cos, self._sin, is_interleaved=self._is_interleaved, head_dim=x.shape[-1]
            )
            return plain.rotate(x)
        self._kernels.rotate(x, self._cos, self._sin, is_interleaved=self._is_interleaved)
        return x

    def norm_and_rotate(self, x: Tensor, num_q_heads: int, q: RMSNorm, k: RMSNorm) -> Tensor:
        """Norms and rotates in place if the kernels accept the tensors; see Rope."""
        norms = self._centred_norms(x, q, k)
        if norms is not None:
            norms.norm_heads(x[:, :num_q_heads], q.weight, q.eps, q.centre)
            norms.norm_heads(x[:, num_q_heads:], k.weight, k.eps, k.centre)
            return self.rotate(x)
        if q.centre is not None or not self._kernels.takes(x, q.weight, k.weight):
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

    def norm_and_rotate_apart(
        self, q: Tensor, k: Tensor, q_norm: RMSNorm, k_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Norms and rotates both in place if kernels have norms that round once; see Rope."""
        norms = self._centred_norms(q, q_norm, k_norm)
        if norms is None or not self._kernels.takes(k):
            return super().norm_and_rotate_apart(q, k, q_norm, k_norm)
        norms.norm_heads(q, q_norm.weight, q_norm.eps, q_norm.centre)
        norms.norm_heads(k, k_norm.weight, k_norm.eps, k_norm.centre)
        return self.rotate(q), self.rotate(k)

    def _centred_norms(self, x: Tensor, q: RMSNorm, k: RMSNorm) -> NormKernels | None:
        """Returns the kernels that norm the heads `x`; None if there are none or the norms
        round before their weights multiply."""
        is_taken = q.centre is not None and self._kernels.takes(x, q.weight, k.weight)
        return self._kernels.norms if is_taken else None


def _plain_rope(cos: Tensor, sin: Tensor, *, is_interleaved: bool, head_dim: int) -> Rope:
    """Builds a rope in plain torch."""
    rope: Rope = (InterleavedRope if is_interleaved else HalfSplitRope)(cos, sin)
    size = 2 * cos.shape[-1]
    return rope if size == head_dim else PartialRope(rope, size)


def _by_chunks(x: Tensor, rotate: Callable[[Tensor, slice], Tensor]) -> Tensor:
    """Applies `rotate` chunk by chunk to rows of `x` in float32 and to their slice, and casts the
    results back to `x`'s dtype."""
    chunks = row_chunks(x, x.shape[1] * x.shape[2], MAX_VALUES)
    if len(chunks) == 1:
        return rotate(x.float(), chunks[0]).to(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows in chunks:
        out[rows] = rotate(x[rows].float(), rows)
    return out


class Rotary(KernelLayer):
    """Computes a Rope from positions.

    frequencies: [1, R / 2] float32; [2, R / 2] with those of long sequences.
    """

    frequencies: Tensor
    axes: Tensor | None

    def __init__(self, config: RotaryConfig) -> None:
        super().__init__()
        self.config = config
        num_pairs = config.num_pairs
        num_rows = 1 if config.long_frequencies is None else 2
        self.register_buffer("frequencies", torch.empty(num_rows, num_pairs), persistent=False)
        axes = None if config.axes is None else torch.empty(num_pairs, dtype=torch.int64)
        self.register_buffer("axes", axes, persistent=False)

    def init_buffers(self, device: torch.device) -> None:
        """Computes the frequencies on the CPU, so that they are the same on every device."""
        config = self.config
        own = config.frequencies
        values = base_frequencies(2 * config.num_pairs, config.theta) if own is None else own
        rows = [values] if config.long_frequencies is None else [values, config.long_frequencies]
        tensors = [torch.as_tensor(row, dtype=torch.float32, device="cpu") for row in rows]
        self.frequencies = torch.stack(tensors).to(device)
        if config.axes is not None:
            self.axes = torch.tensor(config.axes, device="cpu").to(device)

    def forward(self, positions: Tensor, is_long: Tensor | None = None) -> Rope:
        """Returns the rope for int64 positions [T], or [axes, T] for M-RoPE. is_long [T]: the
        tokens of long sequences, see ForwardInputs; None: none."""
        is_interleaved = self.config.is_interleaved
        if self.kernels is not None:
            cos, sin = self._kernel_tables(self.kernels, positions, is_long)
            return KernelRope(cos, sin, is_interleaved=is_interleaved, kernels=self.kernels)
        cos, sin = self._tables(positions, is_long)
        head_dim = self.config.head_dim
        return _plain_rope(cos, sin, is_interleaved=is_interleaved, head_dim=head_dim)

    def _kernel_tables(
        self, kernels: Kernels, positions: Tensor, is_long: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of the positions, computed by kernels where there are some."""
        if kernels.inputs is None:
            return self._tables(positions, is_long)
        scale = self.config.scale
        return kernels.inputs.angles(positions, self.frequencies, self.axes, scale, is_long)

    def _tables(self, positions: Tensor, is_long: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of the positions, [T, R / 2] float32."""
        frequencies = self.frequencies[0 if is_long is None else is_long.long()]
        if self.axes is None:
            per_pair = positions[:, None].float()
        else:
            per_pair = positions[self.axes].T.float().contiguous()
        angles = per_pair * frequencies  # [T, R / 2]
        cos, sin = angles.cos(), angles.sin()
        if self.config.scale != 1.0:
            return cos * self.config.scale, sin * self.config.scale
        return cos, sin


def base_frequencies(size: int, theta: float) -> Tensor:
    """Returns theta ** (-2 i / size) for i in 0 .. size / 2, float32, on the CPU."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    return 1.0 / (theta**exponents)


def sectioned_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes of an M-RoPE in sections: the first sections[0] pairs follow time, the
    next height, then width."""
    return tuple(axis % 3 for axis, size in enumerate(sections) for _ in range(size))


def alternating_axes(sections: Sequence[int]) -> tuple[int, ...]:
    """Returns the axes of an alternating M-RoPE, with sections (height, width, time): pairs
    of height and width alternate, then come those of time. Raises ValueError if height and
    width differ."""
    height, width, time = sections
    if height != width:
        raise ValueError(f"height and width must have equally many channels, got {list(sections)}")
    return (1, 2) * height + (0,) * time
