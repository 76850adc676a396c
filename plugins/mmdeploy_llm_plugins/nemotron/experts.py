"""The mixture of experts of Nemotron-H: plain MLPs, sigmoid scores, a bias that only chooses,
groups of experts, a shared expert, and projections into a smaller space in some models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.layers import (
    MLP,
    Activation,
    Experts,
    Gates,
    GroupRouter,
    KernelLayer,
    Linear,
)


class PlainExperts(Experts):
    """E MLPs without gates, stacked: gate_up_proj [E, I, S] is what comes before the activation,
    down_proj [E, S, I]."""

    is_plain = False

    def __init__(self, config: Any) -> None:
        count, inner = config.n_routed_experts, config.moe_intermediate_size
        size = config.moe_latent_size or config.hidden_size
        super().__init__(count, size, inner)
        self.gate_up_proj = nn.Parameter(torch.empty(count, inner, size), requires_grad=False)
        self.act = Activation(config.mlp_hidden_act)
        self.expert_parts = {
            "up_proj": ("gate_up_proj", slice(0, inner)),  # rows that ranks divide
            "down_proj": ("down_proj", None),
        }

    @property
    def gates(self) -> Gates:
        """See Experts."""
        return Gates(activation=self.act.name, has_gate=False)

    def activate(self, both: Tensor) -> Tensor:
        """See Experts."""
        out: Tensor = self.act(both)
        return out


class NemotronMoE(KernelLayer):
    """Routed experts and a shared one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, latent, bias = config.hidden_size, config.moe_latent_size, config.mlp_bias
        self.gate = GroupRouter(config, rounds_weights=False)
        self.experts = PlainExperts(config)
        inner = config.moe_shared_expert_intermediate_size
        self.shared_experts = MLP(size, inner, size, config.mlp_hidden_act, bias=bias)
        self.fc1_latent_proj = Linear(size, latent, bias=bias) if latent else nn.Identity()
        self.fc2_latent_proj = Linear(latent, size, bias=bias) if latent else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Computes all experts, [T, hidden] -> [T, hidden]."""
        weights, experts = self.gate(x)
        routed = self.experts(self.fc1_latent_proj(x), weights, experts)
        return self.kernels.add_rows(self.fc2_latent_proj(routed), self.shared_experts(x))
