"""Replaces transformers' stacked experts by the engine's, which run on its kernels."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from mmdeploy_llm.layers import Experts

Known = Literal["gelu", "gelu_pytorch_tanh", "quick_gelu", "silu"]  # activations
# What transformers says of a class of experts, where these are gated MLPs without biases.
PLAIN = {
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
}


class AnyExperts(Experts):
    """Has the attributes and parameters of the experts that it replaces."""

    def __init__(self, plain: nn.Module, activation: Known) -> None:
        gate_up, down = plain.get_parameter("gate_up_proj"), plain.get_parameter("down_proj")
        num_experts, size, inner_size = down.shape
        with torch.device("meta"):
            super().__init__(num_experts, size, inner_size, activation)
        self.gate_up_proj, self.down_proj = gate_up, down
        for name, value in vars(plain).items():
            if name not in vars(self):
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Computes the weighted sum of experts, with the arguments that transformers passes."""
        x = hidden_states
        if x.is_meta:  # the tokens of experts cannot be counted
            return torch.empty_like(x)
        if self.is_fused(x):  # these kernels read weights of x's dtype
            top_k_weights = top_k_weights.to(x.dtype)
        return super().forward(x, top_k_weights, top_k_index).to(x.dtype)

    def can_hold_coded(self, name: str) -> bool:
        """Returns False: transformers' names of single matrices are not this engine's."""
        return False


def has_experts(module: nn.Module) -> bool:
    """Whether a module may be experts that `engine_experts` takes."""
    return isinstance(getattr(module, "gate_up_proj", None), nn.Parameter)


def engine_experts(plain: nn.Module, parent_code: str, name: str) -> AnyExperts | None:
    """Returns the engine's experts for those of transformers, which the parent has by this name;
    None where they compute otherwise, or where the parent reads their weights itself."""
    if any(getattr(plain, key, value) is not value for key, value in PLAIN.items()):
        return None
    own = type(plain)
    gate: Any = getattr(own, "_apply_gate", None)
    names = [each for each, _ in plain.named_parameters()]
    activation = _activation(getattr(plain, "act_fn", None))
    is_plain = getattr(gate, "__name__", "") == "_default_apply_gate" and not [*plain.buffers()]
    if not is_plain or sorted(names) != ["down_proj", "gate_up_proj"] or activation is None:
        return None
    if any(f"{name}.{each}" in parent_code for each in names):
        return None
    return AnyExperts(plain, activation)


def _activation(function: Any) -> Known | None:
    """Returns the name of an activation that kernels compute."""
    known: tuple[Known, ...] = get_args(Known)
    return next((name for name in known if type(ACT2FN[name]) is type(function)), None)
