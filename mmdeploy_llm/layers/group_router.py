"""GroupRouter: chooses experts in groups, by sigmoid scores and a bias that only chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.kernels.mixtures import RouteRule
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer, mixture_kernels
from mmdeploy_llm.layers.basic.linear import Linear, empty_parameter

MIN_SUM = 1e-20  # added to the sum that weights are divided by; not in the config


class GroupRouter(KernelLayer, Linear):
    """Chooses the experts with the largest sigmoid of score plus bias among the groups whose two
    best experts have the largest sum, and weights them by their sigmoids. Computes in float32."""

    fp32_parameters = ("weight", "e_score_correction_bias")
    is_exact = True  # a rounded weight would choose other experts

    def __init__(self, config: Any, *, rounds_weights: bool = True) -> None:
        """config: transformers'. rounds_weights: whether the weights of experts have the dtype of
        the hidden states, and not float32."""
        super().__init__(config.hidden_size, config.n_routed_experts)
        self.e_score_correction_bias = empty_parameter(config.n_routed_experts)
        self.rounds_weights = rounds_weights
        self.rule = RouteRule(
            top_k=config.num_experts_per_tok,
            scores="sigmoid",
            is_normed=config.norm_topk_prob,
            norm_more=MIN_SUM,
            num_groups=config.n_group,
            num_used=config.topk_group,
            factor=config.routed_scaling_factor,
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Routes x [T, S]: weights [T, k], expert ids [T, k]."""
        rule, bias = self.rule, self.e_score_correction_bias
        own, dtype = mixture_kernels(self.kernels, x), x.dtype
        dtype = dtype if self.rounds_weights else torch.float32
        if own is not None:
            return own.choose(self.product(own.widen(x)), bias, rule, dtype)
        scores = self.product(x.float()).sigmoid()
        experts = self._in_groups(scores + bias).topk(rule.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if rule.is_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + MIN_SUM)
        weights = weights * rule.factor
        return weights.to(dtype), experts

    def _in_groups(self, scores: Tensor) -> Tensor:
        """Returns [T, E] with -inf for experts outside the best groups."""
        rule = self.rule
        if rule.num_used == rule.num_groups:
            return scores
        groups = scores.view(scores.shape[0], rule.num_groups, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(rule.num_used, -1).indices
        is_left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=scores.device)
        is_left_out.scatter_(1, best, False)
        return groups.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)
