"""Qwen text models, dense or with experts: the standard decoder. Version 2 adds biases to query,
key and value; version 3 normalizes the heads of query and key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    MoEConfig,
    layer_windows,
    rotary_config,
    sparse_layers,
    standard_decoder,
)
from mmdeploy_llm.weights.map import WeightMap

# Keys of configs that with_experts reads.
EXPERT_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
IGNORED = (r"rotary_emb\.inv_freq$",)
# From the published names, which transformers' modules share, to ours.
RENAMES = ((r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),)


class QwenForCausalLM(CausalLM):
    """A Qwen decoder that maps the weights of Qwen's text checkpoints."""

    def __init__(self, decoder: DecoderConfig) -> None:
        super().__init__(decoder)
        ignored = (*IGNORED, "^lm_head") if decoder.is_tied else IGNORED
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)


class Qwen2ForCausalLM(QwenForCausalLM):
    """transformers' Qwen2ForCausalLM."""

    def __init__(self, config: Any) -> None:
        super().__init__(decoder_config(config, is_tied=config.tie_word_embeddings))


class Qwen2MoeForCausalLM(QwenForCausalLM):
    """transformers' Qwen2MoeForCausalLM: the shared expert has a gate."""

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config, is_tied=config.tie_word_embeddings)
        decoder = replace(with_experts(decoder, config), qkv_bias=config.qkv_bias)
        super().__init__(decoder)


class Qwen3ForCausalLM(QwenForCausalLM):
    """transformers' Qwen3ForCausalLM."""

    def __init__(self, config: Any) -> None:
        super().__init__(qwen3_decoder_config(config, is_tied=config.tie_word_embeddings))


class Qwen3MoeForCausalLM(QwenForCausalLM):
    """transformers' Qwen3MoeForCausalLM: no shared expert."""

    def __init__(self, config: Any) -> None:
        decoder = qwen3_decoder_config(config, is_tied=config.tie_word_embeddings)
        super().__init__(with_experts(decoder, config))


def decoder_config(
    config: Any, *, is_tied: bool, axes: tuple[int, ...] | None = None
) -> DecoderConfig:
    """Builds the dense decoder config of a Qwen2 text config. axes: see RotaryConfig."""
    decoder = standard_decoder(config, rotary_config(config, axes=axes), own=EXPERT_KEYS)
    return replace(decoder, qkv_bias=True, windows=layer_windows(config), is_tied=is_tied)


def qwen3_decoder_config(
    config: Any, *, is_tied: bool, axes: tuple[int, ...] | None = None
) -> DecoderConfig:
    """Builds the dense decoder config of a Qwen3 text config. axes: see RotaryConfig."""
    return replace(
        decoder_config(config, is_tied=is_tied, axes=axes),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        qk_norm=True,
    )


def with_experts(decoder: DecoderConfig, config: Any) -> DecoderConfig:
    """Adds the experts of a Qwen MoE config to the layers that the config makes sparse."""
    shared_size = getattr(config, "shared_expert_intermediate_size", None) or 0
    moe = MoEConfig(
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        router="softmax",
        is_normed=config.norm_topk_prob,
        shared_size=shared_size,
        is_shared_gated=shared_size > 0,
    )
    return replace(decoder, moe=moe, moe_layers=sparse_layers(config))
