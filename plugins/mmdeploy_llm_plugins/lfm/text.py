"""LFM2 and LFM2-MoE: gated short convolutions in most layers, grouped-query attention in the
others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmdeploy_llm.caches import LayerCache, PagedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    DecoderLayer,
    DecoderStep,
    Experts,
    GatedMLP,
    GatedShortConv,
    KernelLayer,
    Linear,
    RouteRule,
    refuse_unread,
    rotary_config,
)
from mmdeploy_llm.weights.map import WeightMap

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


OWN_KEYS = (
    "block_auto_adjust_ff_dim",
    "block_ffn_dim_multiplier",
    "block_multiple_of",
    "conv_L_cache",
    "conv_bias",
    "full_attn_idxs",  # what layer_types are made of
    "layer_types",
    "moe_intermediate_size",
    "norm_topk_prob",
    "num_dense_layers",
    "num_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "use_expert_bias",
)
KINDS = ("conv", "full_attention")
# From the published names, which transformers' modules share, to ours.
RENAMES = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.operator_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.(mlp|experts\.\d+)\.w1\.", r".\1.gate_proj."),
    (r"\.(mlp|experts\.\d+)\.w3\.", r".\1.up_proj."),
    (r"\.(mlp|experts\.\d+)\.w2\.", r".\1.down_proj."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
)


class LfmLayer(DecoderLayer):
    """A decoder layer that mixes tokens by a gated short convolution or by attention; with experts
    after the first dense layers of LFM2-MoE."""

    mlp: GatedMLP | LfmExperts  # type: ignore[assignment]

    def __init__(self, config: DecoderConfig, layer: int, *, text: Any) -> None:
        """text: transformers' config."""
        self._text = text
        self._is_conv = text.layer_types[layer] == "conv"
        super().__init__(config, layer)
        if hasattr(text, "num_dense_layers") and layer >= text.num_dense_layers:
            self.mlp = LfmExperts(text)

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """See DecoderLayer."""
        if not self._is_conv:
            super().add_mixer(config, layer)
            return
        text = self._text
        self.conv = GatedShortConv(
            config.hidden_size, text.conv_L_cache, layer, has_bias=text.conv_bias
        )

    def mix(self, x: Tensor, step: DecoderStep) -> Tensor:
        """See DecoderLayer."""
        if not self._is_conv:
            return super().mix(x, step)
        assert step.states is not None, "the model has a cache with states"
        out: Tensor = self.conv(x, step.states)
        return out


class Lfm2ForCausalLM(CausalLM):
    """transformers' Lfm2ForCausalLM and Lfm2MoeForCausalLM."""

    def __init__(self, config: Any, *, is_tied: bool | None = None) -> None:
        """config: the text config. is_tied: None: as it says."""
        is_tied = config.tie_word_embeddings if is_tied is None else is_tied
        decoder = replace(decoder_config(config), is_tied=is_tied)
        super().__init__(decoder, partial(LfmLayer, text=config))
        self.cache = layer_cache(decoder, config)
        ignored = ("^lm_head",) if is_tied else ()
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)


def decoder_config(config: Any) -> DecoderConfig:
    """Converts the config. Raises ModelNotSupportedError for layers of other kinds."""
    unknown = sorted({*config.layer_types} - {*KINDS})
    if unknown:
        raise ModelNotSupportedError(
            f"layer_types {', '.join(unknown)} of this {config.model_type} model are not "
            f"supported, only {' and '.join(KINDS)}"
        )
    refuse_unread(config, OWN_KEYS)
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=mlp_size(config),
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        rotary=rotary_config(config),
        norm_eps=config.norm_eps,
        qk_norm=True,
    )


def mlp_size(config: Any) -> int:
    """Returns the inner channels of the MLP: two thirds of the config's, times a factor, in whole
    multiples, unless block_auto_adjust_ff_dim is off. LFM2-MoE has no such rule."""
    size = int(config.intermediate_size)
    if not getattr(config, "block_auto_adjust_ff_dim", False):
        return size
    size = int(2 * size / 3)
    if config.block_ffn_dim_multiplier is None:
        return size
    size, multiple = int(config.block_ffn_dim_multiplier * size), int(config.block_multiple_of)
    return multiple * -(-size // multiple)


def layer_cache(decoder: DecoderConfig, config: Any) -> Sequence[LayerCache]:
    """Returns what each layer keeps."""
    attention = PagedKV(num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim)
    state = GatedShortConv.state_of(decoder.hidden_size, config.conv_L_cache)
    return tuple(state if kind == "conv" else attention for kind in config.layer_types)
