"""Granite: the standard decoder with factors on embeddings, scores, residuals and logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmdeploy_llm.layers import CausalLM, DecoderConfig, standard_decoder
from mmdeploy_llm.weights.map import WeightMap


class GraniteForCausalLM(CausalLM):
    """transformers' GraniteForCausalLM."""

    def __init__(self, config: Any) -> None:
        decoder = standard_decoder(config, own=())
        super().__init__(decoder)
        self.weight_map = WeightMap(self, ignored=("^lm_head",) if decoder.is_tied else ())


def with_factors(decoder: DecoderConfig, config: Any) -> DecoderConfig:
    """Adds the factors of a Granite config."""
    return replace(
        decoder,
        qkv_bias=config.attention_bias,
        embed_scale=config.embedding_multiplier,
        score_scale=config.attention_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )
