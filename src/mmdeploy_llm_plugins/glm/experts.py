"""The mixture of experts of GLM-4.5: sigmoid scores, a bias that only chooses, groups of experts,
and a shared expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.layers import (
    DecoderConfig,
    Experts,
    GatedMLP,
    KernelLayer,
    Linear,
    RouteRule,
    added,
    mixture_kernels,
)

KEYS = (  # that a text model reads beside the standard ones; vl.py reads the last two
    "n_group",
    "topk_group",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "routed_scaling_factor",
    "first_k_dense_replace",
    "attention_bias",
)
MIN_SUM = 1e-20  # added to the sum that weights are divided by; not in the config


class GlmRouter(KernelLayer, Linear):
    """Chooses the experts with the largest sigmoid of score plus bias among the groups whose two
    best experts have the largest sum, and weights them by their sigmoids. Computes in float32."""

    fp32_parameters = ("weight", "e_score_correction_bias")
    is_exact = True  # a rounded weight would choose other experts

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.n_routed_experts)
        values = torch.empty(config.n_routed_experts)
        self.e_score_correction_bias = nn.Parameter(values, requires_grad=False)
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
        """Routes x [T, S]: weights [T, k] in x's dtype, expert ids [T, k]."""
        own, rule, bias = mixture_kernels(self.kernels, x), self.rule, self.e_score_correction_bias
        if own is not None:
            return own.choose(self.product(own.widen(x)), bias, rule, x.dtype)
        scores = self.product(x.float()).sigmoid()
        experts = self._in_groups(scores + bias).topk(rule.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if rule.is_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + MIN_SUM)
        return (weights * rule.factor).to(x.dtype), experts

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


class GlmExperts(KernelLayer):
    """Routed experts and shared ones."""

    def __init__(self, config: Any, decoder: DecoderConfig) -> None:
        super().__init__()
        size, inner_size = config.hidden_size, config.moe_intermediate_size
        self.gate = GlmRouter(config)
        activation: Any = decoder.activation
        self.experts = Experts(config.n_routed_experts, size, inner_size, activation)
        shared_size = inner_size * config.n_shared_experts
        self.shared_experts = GatedMLP(size, shared_size, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        """Computes all experts, [T, hidden] -> [T, hidden]."""
        weights, experts = self.gate(x)
        routed: Tensor = self.experts(x, weights, experts)
        return added(routed, self.shared_experts(x), self.kernels)
