"""Llama and Mistral: the standard decoder, for Mistral with a sliding window."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.layers import CausalLM, DecoderConfig, standard_decoder
from mmdeploy_llm.weights.map import WeightMap

IGNORED = (r"rotary_emb\.inv_freq$",)


class LlamaForCausalLM(CausalLM):
    """transformers' LlamaForCausalLM."""

    def __init__(self, config: Any) -> None:
        decoder = self.decoder_config(config)
        super().__init__(decoder)
        ignored = (*IGNORED, "^lm_head") if decoder.is_tied else IGNORED
        self.weight_map = WeightMap(self, ignored=ignored)

    @staticmethod
    def decoder_config(config: Any) -> DecoderConfig:
        """Builds the decoder config, with the biases that the checkpoint's config sets."""
        return standard_decoder(config, own=())


class MistralForCausalLM(LlamaForCausalLM):
    """transformers' MistralForCausalLM: a sliding window, if set, applies to every layer."""
