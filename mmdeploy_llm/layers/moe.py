"""Mixture of experts: router, shared experts, and experts chosen by modality.

Shapes: T tokens, E experts, k experts per token, S size of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from mmdeploy_llm.kernels import ActivationName, RouteRule
from mmdeploy_llm.layers.basic.experts import Experts
from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import Linear, Matrix, empty_parameter, of_rows
from mmdeploy_llm.layers.basic.mlp import GatedMLP


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """Sizes and options of a SparseMLP or ModalityMLP.

    router: "corrected" is Router, "softmax" is SoftmaxRouter.
    is_normed: whether SoftmaxRouter divides the weights of the chosen experts by their sum.
    rounds_weights: whether weights that SoftmaxRouter chooses have the dtype of the hidden states,
        and not float32.
    norm_min: lower bound of the sum that Router divides by.
    shared_size: width of all shared experts together, 0 for none.
    is_shared_gated: whether a sigmoid gate weights the output of the shared experts.
    vision_intermediate_size: width of the experts for media tokens only; None when all tokens
        share the same experts.
    activation: of routed and shared experts, by its name in transformers; in a decoder whose own is
        not silu, silu stands for the decoder's.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    router: Literal["corrected", "softmax"] = "corrected"
    is_normed: bool = True
    rounds_weights: bool = True
    norm_min: float = 1e-12
    shared_size: int = 0
    shared_bias: bool = False
    is_shared_gated: bool = False
    vision_intermediate_size: int | None = None
    activation: ActivationName = "silu"


class Router(KernelLayer, Matrix):
    """Chooses the k experts with the largest softmax probability + correction bias, and weights
    them by their normalised probabilities. Computes in float32, with weights in float32."""

    fp32_parameters = ("weight", "correction_bias")
    is_exact = True  # a rounded weight would choose other experts

    def __init__(self, size: int, config: MoEConfig) -> None:
        super().__init__(config.num_experts, size)
        self.correction_bias = empty_parameter(1, config.num_experts)
        self.rule = RouteRule(top_k=config.top_k, norm_min=config.norm_min)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Routes x [T, S]: weights [T, k] in x's dtype, expert ids [T, k]."""
        logits = self.product(self.kernels.widen(x))
        return self.kernels.choose(logits, self.correction_bias[0], self.rule, x.dtype)


class SoftmaxRouter(KernelLayer, Matrix):
    """Chooses the k most probable experts by softmax in float32, weighted by their probabilities,
    which are normalised if the config says so."""

    is_exact = True  # a rounded weight would choose other experts

    def __init__(self, size: int, config: MoEConfig) -> None:
        super().__init__(config.num_experts, size)
        self.rule = RouteRule(top_k=config.top_k, is_normed=config.is_normed)
        self.rounds_weights = config.rounds_weights

    def forward(self, x: Tensor, factors: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Routes x [T, S]: weights [T, k], expert ids [T, k]. factors: [E] in x's dtype, which
        multiply the weights."""
        dtype = x.dtype if self.rounds_weights else torch.float32
        if factors is not None and factors.dtype is not dtype:
            factors = self.kernels.widen(factors)
        return self.kernels.choose(self.product(x), None, self.rule, dtype, factors)


class SparseMLP(KernelLayer):
    """Routed experts, plus shared experts if the config has them."""

    def __init__(self, size: int, config: MoEConfig) -> None:
        super().__init__()
        self.gate = (SoftmaxRouter if config.router == "softmax" else Router)(size, config)
        sizes = config.num_experts, size, config.intermediate_size
        self.experts = Experts(*sizes, config.activation)
        self.shared_experts = _shared_experts(size, config)
        self.shared_expert_gate = Linear(size, 1) if config.is_shared_gated else None

    def forward(self, x: Tensor, is_left_out: Tensor | None = None) -> Tensor:
        """Computes all experts, [T, S] -> [T, S]. is_left_out: [T] bool, tokens for which the
        routed experts return 0; requires Experts.is_fused."""
        weights, experts = self.gate(x)
        if is_left_out is not None:
            experts = experts.masked_fill(is_left_out[:, None], self.experts.down_proj.shape[0])
        out: Tensor = self.experts(x, weights, experts)
        if self.shared_experts is None:
            return out
        gate = None if self.shared_expert_gate is None else self.shared_expert_gate(x)
        return self.kernels.add_rows(out, self.shared_experts(x), gate)


def _shared_experts(size: int, config: MoEConfig) -> GatedMLP | None:
    if config.shared_size == 0:
        return None
    return GatedMLP(size, config.shared_size, bias=config.shared_bias, activation=config.activation)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalityRows:
    """The rows of a step's text tokens and of its media tokens, int64, ascending."""

    text: Tensor
    vision: Tensor


class Modality:
    """Marks which of a step's tokens are media tokens."""

    def __init__(self, is_vision: Tensor) -> None:
        """is_vision: [T] bool."""
        self.is_vision = is_vision

    @cached_property
    def rows(self) -> ModalityRows | None:
        """The rows of each modality; None when no token is a media token. Copies the mask to the
        host, once per step."""
        vision = self.is_vision.nonzero().flatten()
        if vision.numel() == 0:
            return None
        return ModalityRows(text=self.is_vision.logical_not().nonzero().flatten(), vision=vision)


class ModalityMLP(KernelLayer):
    """Routes text tokens to text experts and media tokens to vision experts; shared experts compute
    all tokens."""

    def __init__(self, size: int, config: MoEConfig) -> None:
        """config.vision_intermediate_size must be set."""
        super().__init__()
        assert config.vision_intermediate_size is not None
        text = replace(config, shared_size=0)
        vision = replace(text, intermediate_size=config.vision_intermediate_size)
        self.text_moe = SparseMLP(size, text)
        self.vision_moe = SparseMLP(size, vision)
        self.shared_experts = _shared_experts(size, config)

    def forward(self, x: Tensor, modality: Modality | None) -> Tensor:
        """Computes all experts, [T, S] -> [T, S]. modality: None when all tokens are text."""
        if modality is None:
            out: Tensor = self.text_moe(x)
        elif self.text_moe.experts.is_fused(x):
            is_vision = modality.is_vision
            out = self.text_moe(x, is_vision).add_(self.vision_moe(x, is_vision.logical_not()))
        else:
            out = self._route(x, modality.rows)
        shared = None if self.shared_experts is None else self.shared_experts(x)
        return out if shared is None else self.kernels.add_rows(out, shared)

    def _route(self, x: Tensor, rows: ModalityRows | None) -> Tensor:
        if rows is None or rows.text.numel() == 0:
            out: Tensor = (self.text_moe if rows is None else self.vision_moe)(x)
            return out
        out = torch.empty_like(x)
        for own, moe in ((rows.text, self.text_moe), (rows.vision, self.vision_moe)):
            with of_rows(own, moe.experts, moe.gate):
                out.index_copy_(0, own, moe(x.index_select(0, own)))
        return out
