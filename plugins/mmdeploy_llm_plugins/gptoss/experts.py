"""The mixture of experts of gpt-oss: biases everywhere, weights by softmax over the chosen experts,
and a SwiGLU whose inputs are clamped.

Shapes: T tokens, E experts, k experts per token, S size of the hidden states, I width of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.layers import Experts, Gates, KernelLayer, Linear, RouteRule


class GptOssRouter(KernelLayer, Linear):
    """Chooses the experts with the largest scores, weighted by softmax over these alone."""

    is_exact = True  # a rounded weight would choose other experts

    def __init__(self, config: Any) -> None:
        super().__init__(config.hidden_size, config.num_local_experts, bias=True)
        top_k = config.num_experts_per_tok
        self.rule = RouteRule(top_k=top_k, scores="softmax of chosen", is_normed=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Routes x [T, S]: weights [T, k] in x's dtype, expert ids [T, k]."""
        return self.kernels.choose(self.product(x, self.bias), None, self.rule, x.dtype)


class ClampedExperts(Experts):
    """Computes down((up + 1) * gate * sigmoid(alpha * gate)), with gate at most the limit and up
    within it. Rows of gate and up alternate in gate_up_proj, as in the checkpoint.

    gate_up_proj_bias: [E, 2 I]. down_proj_bias: [E, S].
    """

    is_plain = False
    added_once = ("down_proj_bias",)

    def __init__(self, config: Any) -> None:
        count, size, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
        super().__init__(count, size, inner)
        # Older versions of transformers have these numbers in their code, not in the config.
        self.alpha = getattr(config, "swiglu_alpha", 1.702)
        self.limit = getattr(config, "swiglu_limit", 7.0)
        self.gate_up_proj_bias = _empty(count, 2 * inner)
        self.down_proj_bias: nn.Parameter | None = _empty(count, size)
        both = slice(0, 2 * inner)
        self.expert_parts = {
            "gate_up_proj": ("gate_up_proj", both),
            "gate_up_proj_bias": ("gate_up_proj_bias", both),
            "down_proj": ("down_proj", None),
        }

    @property
    def gates(self) -> Gates:
        """See Experts."""
        return Gates(activation="clamped", alpha=self.alpha, limit=self.limit)

    def biases(self, expert: int) -> tuple[Tensor | None, Tensor | None]:
        """See Experts."""
        last = None if self.down_proj_bias is None else self.down_proj_bias[expert]
        return self.gate_up_proj_bias[expert], last

    def activate(self, both: Tensor) -> Tensor:
        """See Experts."""
        return self.kernels.clamped_mul(both, self.alpha, self.limit)


class GptOssMLP(nn.Module):
    """Routed experts."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router = GptOssRouter(config)
        self.experts = ClampedExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        """Computes all experts, [T, S] -> [T, S]."""
        weights, experts = self.router(x)
        out: Tensor = self.experts(x, weights, experts)
        return out


def _empty(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape), requires_grad=False)
