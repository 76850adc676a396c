"""OLMoE: experts in every layer, and norms over all heads of query and of key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import CausalLM, DecoderConfig, MoEConfig, standard_decoder
from mmdeploy_llm.weights.map import WeightMap

EXPERT_KEYS = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "clip_qkv")
IGNORED = (r"rotary_emb\.inv_freq$",)


class OlmoeForCausalLM(CausalLM):
    """transformers' OlmoeForCausalLM."""

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config)
        super().__init__(decoder)
        ignored = (*IGNORED, "^lm_head") if decoder.is_tied else IGNORED
        self.weight_map = WeightMap(self, ignored=ignored)


def decoder_config(config: Any) -> DecoderConfig:
    """Converts an olmoe config. Raises ModelNotSupportedError for clip_qkv."""
    if config.clip_qkv is not None:
        raise ModelNotSupportedError(
            f"clip_qkv = {config.clip_qkv} of this olmoe model is not supported, only null; "
            "blocked_plugins=('olmo',) leaves the model to transformers_any"
        )
    return replace(
        standard_decoder(config, own=EXPERT_KEYS),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        has_full_qk_norm=True,
        moe=MoEConfig(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
            router="softmax",
            is_normed=config.norm_topk_prob,
        ),
        moe_layers=frozenset(range(config.num_hidden_layers)),
    )
