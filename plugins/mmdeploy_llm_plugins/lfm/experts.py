"""The mixture of experts of LFM2-MoE: sigmoid scores, and a bias that only chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.layers import Experts, KernelLayer, Linear, RouteRule

MIN_SUM = 1e-6  # added to the sum that weights are divided by; not in the config


class LfmRouter(Linear):
    """Scores of experts, as logits."""

    is_exact = True  # a rounded weight would choose other experts


class LfmExperts(KernelLayer):
    """Sends each token to the experts with the largest sigmoid of score plus bias, and weights
    their outputs by the sigmoids."""

    fp32_parameters = ("expert_bias",)

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, num_experts = config.hidden_size, config.num_experts
        self.gate = LfmRouter(size, num_experts)
        self.experts = Experts(num_experts, size, config.moe_intermediate_size)
        self.expert_bias = None
        if config.use_expert_bias:
            self.expert_bias = nn.Parameter(torch.empty(num_experts), requires_grad=False)
        self.rule = RouteRule(
            top_k=config.num_experts_per_tok,
            scores="sigmoid",
            is_normed=config.norm_topk_prob,
            norm_more=MIN_SUM,
            factor=config.routed_scaling_factor,
            rounds=True,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Computes the weighted sum of experts, [T, hidden] -> [T, hidden]."""
        own = self.gate(x), self.expert_bias, self.rule
        weights, experts = self.kernels.choose(*own, x.dtype)
        out: Tensor = self.experts(x, weights, experts)
        return out
