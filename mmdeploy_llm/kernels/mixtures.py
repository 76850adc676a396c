"""Mixtures of experts: how a router chooses, in plain torch too, and what an expert computes.

Shapes: T tokens, E experts, k experts per token, S size of the hidden states, I width of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .low_rank import ExpertChanges
from .plain import ActivationName

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
    as Kernels.clamped_mul does. has_gate: False where it is activation(up)."""

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


def choose(
    logits: Tensor, bias: Tensor | None, rule: RouteRule, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Computes Kernels.choose without factors."""
    if rule.scores == "softmax of chosen":
        best, experts = logits.topk(rule.top_k, -1)
        return best.softmax(-1).to(dtype), experts
    if rule.scores == "softmax":
        scores = logits.softmax(-1, dtype=torch.float32)
    else:
        scores = (logits if rule.rounds else logits.float()).sigmoid()
    chosen_by = _in_groups(scores if bias is None else scores + bias, rule)
    experts = chosen_by.topk(rule.top_k, -1).indices
    weights = scores.gather(-1, experts)
    if rule.is_normed:
        total = weights.sum(-1, keepdim=True).clamp_(min=rule.norm_min)
        weights = weights / (total + rule.norm_more)
    return (weights * rule.factor).to(dtype), experts


def _in_groups(scores: Tensor, rule: RouteRule) -> Tensor:
    """Returns [T, E] with -inf for experts outside the best groups."""
    if rule.num_used == rule.num_groups:
        return scores
    groups = scores.view(scores.shape[0], rule.num_groups, -1)
    best = groups.topk(2, -1).values.sum(-1).topk(rule.num_used, -1).indices
    is_left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device)
    is_left_out.scatter_(1, best, False)
    return groups.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)
