"""GLM-4: the standard decoder with interleaved rotary pairs on the first channels of every head;
the newer models also normalize the outputs of attention and MLP. GLM-4.5 has experts instead, and
rotates halves."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mmdeploy_llm.layers import CausalLM, DecoderConfig, rotary_config, standard_decoder
from mmdeploy_llm.weights.map import WeightMap

from .experts import KEYS, GlmLayer, draft_keys

MOE_KEYS = (*KEYS, "use_qk_norm", "num_mtp_layers")  # that GLM-4.5 has beside the standard ones
IGNORED = (r"rotary_emb\.inv_freq$",)


class GlmForCausalLM(CausalLM):
    """transformers' GlmForCausalLM and Glm4ForCausalLM."""

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config)
        super().__init__(decoder)
        ignored = (*IGNORED, "^lm_head") if decoder.is_tied else IGNORED
        self.weight_map = WeightMap(self, ignored=ignored)


def decoder_config(config: Any) -> DecoderConfig:
    """Builds the decoder config of a glm or glm4 config."""
    return replace(
        standard_decoder(config, rotary_config(config, is_interleaved=True), own=()),
        out_bias=False,
        post_norms=config.model_type == "glm4",
    )


class GlmMoeForCausalLM(CausalLM):
    """transformers' Glm4MoeForCausalLM: GLM-4.5, 4.6 and 4.7."""

    def __init__(self, config: Any) -> None:
        decoder = moe_decoder_config(config)
        super().__init__(decoder, partial(GlmLayer, text=config))
        tied = ("^lm_head",) if decoder.is_tied else ()
        self.weight_map = WeightMap(self, ignored=(*IGNORED, *tied, draft_keys(decoder)))


def moe_decoder_config(config: Any) -> DecoderConfig:
    """Builds the decoder config of a glm4_moe config."""
    return replace(
        standard_decoder(config, rotary_config(config), own=MOE_KEYS),
        out_bias=False,
        qk_norm=config.use_qk_norm,
    )
