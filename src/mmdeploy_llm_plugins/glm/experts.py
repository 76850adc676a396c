"""The mixture of experts of GLM-4.5: sigmoid scores, a bias that only chooses, groups of experts,
and a shared expert."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmdeploy_llm.layers import (
    DecoderConfig,
    Experts,
    GatedMLP,
    GroupRouter,
    KernelLayer,
    added,
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


class GlmExperts(KernelLayer):
    """Routed experts and shared ones."""

    def __init__(self, config: Any, decoder: DecoderConfig) -> None:
        super().__init__()
        size, inner_size = config.hidden_size, config.moe_intermediate_size
        self.gate = GroupRouter(config)
        activation: Any = decoder.activation
        self.experts = Experts(config.n_routed_experts, size, inner_size, activation)
        shared_size = inner_size * config.n_shared_experts
        self.shared_experts = GatedMLP(size, shared_size, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        """Computes all experts, [T, hidden] -> [T, hidden]."""
        weights, experts = self.gate(x)
        routed: Tensor = self.experts(x, weights, experts)
        return added(routed, self.shared_experts(x), self.kernels)
