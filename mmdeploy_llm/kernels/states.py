"""The inputs of layers that keep a state of each sequence.

Shapes: T tokens, H value heads, D channels of a key, V of a value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


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
