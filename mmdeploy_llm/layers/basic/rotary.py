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
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.forward import QKRotary
from mmdeploy_llm.hooks.renames import with_old_names
from mmdeploy_llm.kernels import Kernels

from .kernel_layer import KernelLayer
from .norm import RMSNorm

NUM_AXES = 3  # of positions: time, height, width


# Old name -> the new one, and the version of the package that removes the old one.
@with_old_names({"turned_dim": ("rotary_dim", "0.3")})
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
    """Rotates heads by the cos and sin of one step's positions. Results may lie in the memory of
    the heads."""

    @abstractmethod
    def rotate(self, x: Tensor) -> Tensor:
        """Returns `x` [T, N, D] with every head rotated, in the same dtype."""

    @abstractmethod
    def norm_and_rotate(self, x: Tensor, num_q_heads: int, q: RMSNorm, k: RMSNorm) -> Tensor:
        """Norms the first num_q_heads heads with `q` and the others with `k`, then rotates as
        `rotate` does."""

    @abstractmethod
    def norm_and_rotate_apart(
        self, q: Tensor, k: Tensor, q_norm: RMSNorm, k_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """Returns `q` [T, H, D] and `k` [T, K, D], which need not be adjacent in memory, normed and
        rotated."""

    @abstractmethod
    def qk_rotary(self, x: Tensor, norms: tuple[RMSNorm, RMSNorm] | None) -> QKRotary | None:
        """Returns the arguments with which attention norms and rotates the heads of `x` [T, N, D]
        itself; None if it cannot."""


class NoRope(Rope):
    """Leaves heads unrotated: the rope of layers without rotary embedding."""

    def rotate(self, x: Tensor) -> Tensor:
        return x

    def norm_and_rotate(self, x: Tensor, num_q_heads: int, q: RMSNorm, k: RMSNorm) -> Tensor:
        parts = self.norm_and_rotate_apart(x[:, :num_q_heads], x[:, num_q_heads:], q, k)
        return x if parts[0].data_ptr() == x.data_ptr() else torch.cat(parts, 1)

    def norm_and_rotate_apart(
        self, q: Tensor, k: Tensor, q_norm: RMSNorm, k_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        return q_norm.of_heads(q), k_norm.of_heads(k)

    def qk_rotary(self, x: Tensor, norms: tuple[RMSNorm, RMSNorm] | None) -> QKRotary | None:
        return None


class RotaryRope(Rope):
    """Rotates pairs of channels, the first R channels of a head or all of them."""

    def __init__(self, cos: Tensor, sin: Tensor, *, is_interleaved: bool, kernels: Kernels) -> None:
        """cos, sin: [T, R / 2] float32."""
        self._cos, self._sin = cos, sin
        self._is_interleaved = is_interleaved
        self._kernels = kernels

    def rotate(self, x: Tensor) -> Tensor:
        own = self._cos, self._sin
        return self._kernels.rotate(x, *own, is_interleaved=self._is_interleaved)

    def norm_and_rotate(self, x: Tensor, num_q_heads: int, q: RMSNorm, k: RMSNorm) -> Tensor:
        return self._kernels.norm_and_rotate(x, num_q_heads, self._with(q, k), q.centre)

    def norm_and_rotate_apart(
        self, q: Tensor, k: Tensor, q_norm: RMSNorm, k_norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        rotary = self._with(q_norm, k_norm)
        return self._kernels.norm_and_rotate_apart(q, k, rotary, q_norm.centre)

    def qk_rotary(self, x: Tensor, norms: tuple[RMSNorm, RMSNorm] | None) -> QKRotary | None:
        """Returns this rope as data for attention's kernel; None if the kernels do not accept
        `x`."""
        if any(norm.centre is not None for norm in norms or ()):
            return None
        rotary = self._with(*(norms or (None, None)))
        return rotary if self._kernels.takes(x, rotary.q_weight, rotary.k_weight) else None

    def _with(self, q: RMSNorm | None, k: RMSNorm | None) -> QKRotary:
        """Returns this rope and the norms before it as data, norms of one eps and centre."""
        return QKRotary(
            cosines=self._cos,
            sines=self._sin,
            is_interleaved=self._is_interleaved,
            q_weight=None if q is None else q.weight,
            k_weight=None if k is None else k.weight,
            eps=0.0 if q is None else q.eps,
        )


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
        own, config = (self.frequencies, self.axes), self.config
        cos, sin = self.kernels.angles(positions, *own, config.scale, is_long)
        interleaved = config.is_interleaved
        return RotaryRope(cos, sin, is_interleaved=interleaved, kernels=self.kernels)


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
