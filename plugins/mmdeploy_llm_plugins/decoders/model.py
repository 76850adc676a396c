"""Builds the models of families.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import CausalLM, DecoderConfig, rotary_config, standard_decoder
from mmdeploy_llm.weights.map import Target, WeightMap, fused_head_targets

from .families import FAMILIES
from .family import Family


def new_model(config: Any) -> StandardModel:
    """Returns the model of a config whose model_type is one of FAMILIES. Raises
    ModelNotSupportedError for what the standard decoder does not compute."""
    family = FAMILIES[config.model_type]
    return StandardModel(family, decoder_config(family, config))


def refusal(config: Any) -> str | None:
    """Returns why `new_model` raises for a config, which may lack a key or have an unknown value;
    None where it does not raise."""
    try:
        decoder_config(FAMILIES[config.model_type], config)
    except ModelNotSupportedError as error:
        return str(error)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        return f"its config.json is not as expected: {type(error).__name__}: {error}"
    return None


def decoder_config(family: Family, config: Any) -> DecoderConfig:
    """Converts a config. Raises ModelNotSupportedError for what the standard decoder lacks, and for
    adapters that the checkpoint's config brings."""
    if getattr(config, "has_lora_adapter", False):
        raise ModelNotSupportedError("its config.json has an adapter")
    rotary = family.rotary(config)
    if family.is_interleaved:
        rotary = rotary_config(config, is_interleaved=True)
    size = family.intermediate_size(config)
    decoder = standard_decoder(config, rotary, intermediate_size=size, own=family.own)
    decoder = replace(decoder, **family.options, **family.more(config))
    if decoder.is_tied and decoder.head_bias:
        raise ModelNotSupportedError("tie_word_embeddings with a bias of the head is not supported")
    return decoder


class StandardModel(CausalLM):
    """The standard decoder with the options and the weights' names of a family."""

    def __init__(self, family: Family, decoder: DecoderConfig) -> None:
        super().__init__(decoder)
        self._has_fused_heads = family.has_fused_heads
        ignored = (r"rotary_emb\.inv_freq$", *family.ignored)
        if decoder.is_tied:
            ignored += (r"^(lm_head|embed_out)\.",)
        self.weight_map = WeightMap(self, renames=family.renames, ignored=ignored)

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map."""
        targets = super().weight_targets(key)
        if not self._has_fused_heads or not targets or ".qkv_proj." not in targets[0].name:
            return targets
        own = self.sizes  # of all ranks together
        group = own.num_heads // own.num_kv_heads
        return fused_head_targets(targets[0].name, own.num_kv_heads, own.head_dim, group)
