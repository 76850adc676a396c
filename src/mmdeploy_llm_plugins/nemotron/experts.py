"""The mixture of experts of Nemotron-H: plain MLPs, sigmoid scores, a bias that only chooses,
groups of experts, a shared expert, and projections into a smaller space in some models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.layers import MLP, Activation, Experts, Linear

MIN_SUM = 1e-20  # added to the sum that weights are divided by; not in the config


class NemotronRouter(Linear):
    """Chooses the experts with the largest sigmoid of score plus bias among the groups whose two
    best experts have the largest sum, and weights them by their sigmoids. Computes in float32."""

    fp32_parameters = ("weight", "e_score_correction_bias")
    is_exact = True  # a rounded weight would choose other experts

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.n_routed_experts)
        values = torch.empty(config.n_routed_experts)
        self.e_score_correction_bias = nn.Parameter(values, requires_grad=False)
        self.num_groups, self.num_used = config.n_group, config.topk_group
        self.top_k, self.is_normed = config.num_experts_per_tok, config.norm_topk_prob
        self.scale = config.routed_scaling_factor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Routes x [T, S]: weights [T, k] in float32, expert ids [T, k]."""
        scores = self.product(x.float()).sigmoid()
        choice = scores + self.e_score_correction_bias
        groups = choice.view(len(choice), self.num_groups, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(self.num_used, -1).indices
        is_left_out = torch.ones(groups.shape[:2], dtype=torch.bool, device=x.device)
        is_left_out.scatter_(1, best, False)
        choice = groups.masked_fill(is_left_out[..., None], float("-inf")).flatten(1)
        experts = choice.topk(self.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if self.is_normed:
            weights = weights / (weights.sum(-1, keepdim=True) + MIN_SUM)
        return weights * self.scale, experts


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
            "up_proj": ("gate_up_proj", None),
            "down_proj": ("down_proj", None),
        }

    def activate(self, both: Tensor) -> Tensor:
        """See Experts."""
        out: Tensor = self.act(both)
        return out


class NemotronMoE(nn.Module):
    """Routed experts and a shared one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, latent, bias = config.hidden_size, config.moe_latent_size, config.mlp_bias
        self.gate = NemotronRouter(config)
        self.experts = PlainExperts(config)
        inner = config.moe_shared_expert_intermediate_size
        self.shared_experts = MLP(size, inner, size, config.mlp_hidden_act, bias=bias)
        self.fc1_latent_proj = Linear(size, latent, bias=bias) if latent else nn.Identity()
        self.fc2_latent_proj = Linear(latent, size, bias=bias) if latent else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Computes all experts, [T, hidden] -> [T, hidden]."""
        weights, experts = self.gate(x)
        routed = self.experts(self.fc1_latent_proj(x), weights, experts).to(x.dtype)
        out: Tensor = self.fc2_latent_proj(routed) + self.shared_experts(x)
        return out
