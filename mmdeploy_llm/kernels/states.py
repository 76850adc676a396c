"""Parts of kernels.Kernels for layers that keep a state of each sequence, and for their norms.

Shapes: T tokens, H value heads, D channels of a key, V of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from mmdeploy_llm.forward import StateContext


class NormKernels(Protocol):
    """Computes norms that not every device has kernels for."""

    def centred_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        residual: Tensor | None = None,
        centre: float = 1.0,
    ) -> Tensor:
        """Returns norm(x) * (centre + weight) for rows [T, size], rounded once. With a residual
        [T, size], adds x to it in place and norms the sum."""

    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        residual: Tensor | None = None,
        *,
        is_centred: bool,
    ) -> Tensor:
        """Returns torch's layer_norm of rows [T, size], rounded once. is_centred: whether
        1 + weight, rounded, multiplies. With a residual [T, size], adds x to it in place and norms
        the sum."""

    def norm_heads(
        self, x: Tensor, weight: Tensor, eps: float, centre: float | None = None
    ) -> None:
        """Norms every head of x [T, heads, D] in place as `rms_norm` norms a row, or with a centre
        as `centred_norm` does. Only the channels of a head need be contiguous."""

    def normed_heads(self, x: Tensor, eps: float) -> Tensor:
        """Returns every head of x [T, heads, D] normed, without a weight. Only the channels of a
        head need be contiguous."""

    def add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        to: Tensor,
        factor: Tensor | None = None,
        centre: float | None = None,
    ) -> None:
        """Adds the norm of `rms_norm` for rows [T, size], or with a centre that of `centred_norm`,
        to `to` [T, size], contiguous, and multiplies by `factor` [1], if there is one; rounds after
        each operation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaInputs:
    """The inputs of a layer of the gated delta rule with K key heads.

    qkv: [T, 2 K D + H V], after the convolution. z: [T, H V]. a, b: [T, H], of one stride.
    a_log, dt_bias: [H] float32. norm_weight: [V]. eps: of the norm.
    """

    qkv: Tensor
    z: Tensor
    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Inputs:
    """The inputs of a layer of Mamba-2 with H heads of P channels in G groups, and N states.

    rows: [T, H P + 2 G N], x, B and C after the convolution. z: [T, H P]. dt: [T, H].
    a_log, dt_bias, skip: [H] float32. norm_weight: [H P]; None: no norm. eps: of the norm over
    each group. limits: of the time steps.
    """

    rows: Tensor
    z: Tensor
    dt: Tensor
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor
    norm_weight: Tensor | None
    eps: float
    num_groups: int
    limits: tuple[float, float]


class StateKernels(Protocol):
    """Computes layers with a state of each sequence on the host. They read and write the rows of
    the states that `states` names."""

    def can_convolve(self, x: Tensor, weight: Tensor, state: Tensor) -> bool:
        """Whether `short_conv` takes tensors like these."""

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        states: StateContext,
        *,
        has_silu: bool,
    ) -> Tensor:
        """Convolves each channel of x [T, C] with its weights [C, 1, k] over the last k tokens,
        adds `bias` [C], and applies silu: [T, C]. state: [rows, C, k - 1], the last inputs."""

    def can_delta(self, inputs: DeltaInputs, matrices: Tensor) -> bool:
        """Whether `gated_delta` takes tensors like these."""

    def gated_delta(
        self, inputs: DeltaInputs, matrices: Tensor, last: Tensor, states: StateContext
    ) -> Tensor:
        """Runs the gated delta rule and its gated norm, [T, H V]. matrices: [rows, H, D, V]
        float32, the rows `source` and `target` of the states. last: [rows, H, D + V + 3] float32,
        zero at first: the last token of each row where its matrix is that before the token."""

    def can_mamba2(self, inputs: Mamba2Inputs, matrices: Tensor) -> bool:
        """Whether `mamba2` takes tensors like these."""

    def mamba2(
        self, inputs: Mamba2Inputs, matrices: Tensor, last: Tensor | None, states: StateContext
    ) -> Tensor:
        """Runs the state space and its gated norm, [T, H P]. matrices: [rows, H, N, P] float32,
        last: [rows, H, N + P + 3], as gated_delta has them; without `last`, none change in place,
        and a sequence may have one row before and after the step."""
