"""Phi-3: the standard decoder, with windows in the small models and, in those for long contexts,
rotary frequencies that depend on the length of a sequence (longrope)."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.layers import CausalLM, standard_decoder
from mmdeploy_llm.weights.map import WeightMap

IGNORED = (r"rotary_emb\.inv_freq$",)


class Phi3ForCausalLM(CausalLM):
    """transformers' Phi3ForCausalLM, whose checkpoints store query, key and value as one matrix,
    and gate and up."""

    def __init__(self, config: Any) -> None:
        decoder = standard_decoder(config, own=())
        super().__init__(decoder)
        ignored = (*IGNORED, "^lm_head") if decoder.is_tied else IGNORED
        self.weight_map = WeightMap(self, ignored=ignored)
