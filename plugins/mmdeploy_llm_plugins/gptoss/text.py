"""gpt-oss: the standard decoder with windows in every other layer, attention sinks and YaRN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    DecoderLayer,
    layer_windows,
    standard_decoder,
)
from mmdeploy_llm.weights.map import Target, WeightMap

from .experts import GptOssMLP

EXPERT_KEYS = ("num_local_experts", "num_experts_per_tok", "swiglu_alpha", "swiglu_limit")
STACKS = (".experts.gate_up_proj", ".experts.down_proj")


class GptOssLayer(DecoderLayer):
    """A decoder layer whose MLP are experts."""

    mlp: GptOssMLP  # type: ignore[assignment]

    def __init__(self, config: DecoderConfig, layer: int, *, text: Any) -> None:
        """text: transformers' config."""
        super().__init__(config, layer)
        self.mlp = GptOssMLP(text)


class GptOssForCausalLM(CausalLM):
    """transformers' GptOssForCausalLM."""

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config)
        super().__init__(decoder, partial(GptOssLayer, text=config))
        self.weight_map = WeightMap(self, ignored=("^lm_head",) if decoder.is_tied else ())

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map. The matrices of stacked experts are stored as [k, n]."""
        targets = super().weight_targets(key)
        if targets and key.endswith(STACKS):
            return [replace(target, transpose=True) for target in targets]
        return targets


def decoder_config(config: Any) -> DecoderConfig:
    """Converts the config."""
    return replace(
        standard_decoder(config, own=EXPERT_KEYS),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        windows=layer_windows(config),
        has_sinks=True,
        rounds_norms_late=True,
    )
