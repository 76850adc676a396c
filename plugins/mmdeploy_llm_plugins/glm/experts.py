"""The layers of GLM-4.5: a mixture of experts with sigmoid scores, a bias that only chooses, groups
of experts, and a shared expert."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmdeploy_llm.layers import (
    DecoderConfig,
    DecoderLayer,
    Experts,
    GatedMLP,
    GroupRouter,
    KernelLayer,
)

WITH_EXPERTS = ("glm4_moe", "glm4v_moe_text")  # model_type of the text configs of such models
KEYS = (  # that a text model reads beside the standard ones; GlmLayer and vl.py read the last two
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
        self.gate = GroupRouter(config, rounds_weights=False)
        activation: Any = decoder.activation
        self.experts = Experts(config.n_routed_experts, size, inner_size, activation)
        shared_size = inner_size * config.n_shared_experts
        self.shared_experts = GatedMLP(size, shared_size, activation=activation)

    def forward(self, x: Tensor) -> Tensor:
        """Computes all experts, [T, hidden] -> [T, hidden]."""
        weights, experts = self.gate(x)
        routed: Tensor = self.experts(x, weights, experts)
        return self.kernels.add_rows(routed, self.shared_experts(x))


class GlmLayer(DecoderLayer):
    """A decoder layer, with experts after the first dense layers of a model that has experts."""

    mlp: GatedMLP | GlmExperts  # type: ignore[assignment]

    def __init__(self, config: DecoderConfig, layer: int, *, text: Any) -> None:
        """text: transformers' config."""
        super().__init__(config, layer)
        is_sparse = type(text).model_type in WITH_EXPERTS
        if is_sparse and layer >= text.first_k_dense_replace:
            self.mlp = GlmExperts(text, config)


def draft_keys(decoder: DecoderConfig) -> str:
    """Returns the pattern of the tensors of the draft layer, which is used on demand."""
    return rf"^model\.(?:language_model\.)?layers\.{decoder.num_layers}\."
