"""Parts of kernels.Kernels for mixtures of experts, whose matrices are packed one by one.

Shapes: T tokens, E experts, k experts per token, S size of the hidden states, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from . import ActivationName, PackedWeight
    from .low_rank import ExpertChanges

# Of each expert: softmax over all, or over those that are chosen; or the sigmoid.
Scores = Literal["softmax", "softmax of chosen", "sigmoid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteRule:
    """How a router chooses experts and weights them by their scores.

    is_normed: whether weights are divided by their sum, which is norm_min or more, plus norm_more.
    num_used: how many groups of experts, those whose two best have the largest sum, may be chosen
        from.
    factor: of the weights. rounds: whether scores, sum and quotient are rounded to the dtype of the
        logits.
    """

    top_k: int
    scores: Scores = "softmax"
    is_normed: bool = True
    norm_min: float = 0.0
    norm_more: float = 0.0
    num_groups: int = 1
    num_used: int = 1
    factor: float = 1.0
    rounds: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Gates:
    """Says what an expert computes between its products: activation(gate) * up; "clamped":
    as ActivationKernels.clamped_mul does. has_gate: False where it is activation(up)."""

    activation: ActivationName | Literal["clamped"] = "silu"
    alpha: float = 0.0
    limit: float = 0.0
    has_gate: bool = True


class Mixture(Protocol):
    """The experts of one layer: MLPs."""

    def takes(self, changes: ExpertChanges) -> bool:
        """Whether `run` adds these changes: their tables are those of the same kernels."""

    def run(
        self,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        gates: Gates,
        changes: ExpertChanges | None = None,
    ) -> Tensor:
        """Computes the weighted sum of experts: x [T, S], weights [T, k] of x's dtype or float32,
        ids [T, k] -> [T, S] of x's dtype, with the bits of a loop over experts. changes: of
        adapters, which it takes."""


class MixtureKernels(Protocol):
    """Computes routers, and experts in few tokens, on the host."""

    def widen(self, x: Tensor) -> Tensor:
        """Returns `x`, contiguous, in float32."""

    def choose(
        self,
        logits: Tensor,
        bias: Tensor | None,
        rule: RouteRule,
        dtype: torch.dtype,
        factors: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Chooses experts by logits [T, E], contiguous: their weights [T, k] in `dtype` and ids
        [T, k], best first, the lower of equal ones. bias: [E] float32, added to the scores that
        choose. factors: [E] in `dtype`, which multiply the weights."""

    def mixture(
        self,
        pairs: Sequence[tuple[PackedWeight, PackedWeight]],
        sizes: tuple[int, int],
        dtype: torch.dtype,
        biases: Sequence[tuple[Tensor | None, Tensor | None]],
        *,
        is_in_file: bool = False,
    ) -> Mixture | None:
        """Returns the experts with these matrices and biases, gate and up together and down; None
        where their products are more than a call each. sizes: S and I. dtype: of x and biases.
        is_in_file: whether the matrices are pages of a file, those of an expert one after the
        other, that memory does not hold: each step has those read that it needs."""
