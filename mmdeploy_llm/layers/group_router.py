"""GroupRouter: chooses experts in groups, by sigmoid scores and a bias that only chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.kernels import RouteRule
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
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
        dtype = x.dtype if self.rounds_weights else torch.float32
        logits = self.product(self.kernels.widen(x))
        return self.kernels.choose(logits, self.e_score_correction_bias, self.rule, dtype)
