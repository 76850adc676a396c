"""Qwen2 text models: the standard decoder with biases on query, key and value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.layers import CausalLM, DecoderConfig, RotaryConfig
from mmdeploy_llm.weights.map import Target, WeightMap

IGNORED = (r"rotary_emb\.inv_freq$",)
# Scaled variants whose frequencies do not depend on the length of the sequence.
STATIC_ROPE_TYPES = ("linear", "llama3", "yarn")


class QwenForCausalLM(CausalLM):
    """transformers' Qwen2ForCausalLM."""

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config, is_tied=config.tie_word_embeddings)
        super().__init__(decoder)
        ignored = (*IGNORED, "^lm_head") if decoder.is_tied else IGNORED
        self._weights = WeightMap(self, ignored=ignored)

    def weight_targets(self, key: str) -> Sequence[Target] | None:
        """See weights.map."""
        return self._weights.targets(key)

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """None: token i is at position i."""
        return None


def decoder_config(
    config: Any, *, is_tied: bool, axes: tuple[int, ...] | None = None
) -> DecoderConfig:
    """The decoder of a Qwen2 text config. Raises ModelNotSupportedError for sliding windows and
    unknown activations."""
    if "sliding_attention" in (config.layer_types or ()):
        raise ModelNotSupportedError(
            "sliding window attention is not supported; set use_sliding_window to false in "
            "config.json if the prompts are shorter than the window"
        )
    if config.hidden_act != "silu":
        raise ModelNotSupportedError(
            f"hidden_act {config.hidden_act!r} of this Qwen model is not supported, only 'silu'"
        )
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        rotary=rotary_config(config, axes),
        norm_eps=config.rms_norm_eps,
        qkv_bias=True,
        is_tied=is_tied,
    )


def rotary_config(config: Any, axes: tuple[int, ...] | None) -> RotaryConfig:
    """Frequencies from the config's rope_parameters, scaled ones computed by transformers."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if kind == "default":
        return RotaryConfig(head_dim=head_dim, theta=rope["rope_theta"], axes=axes)
    if kind not in STATIC_ROPE_TYPES:
        raise ModelNotSupportedError(
            f"rope_type {kind!r} is not supported, only default, {', '.join(STATIC_ROPE_TYPES)}"
        )
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with torch.device("cpu"):  # the model itself is built on "meta"
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, device="cpu")
    return RotaryConfig(
        head_dim=head_dim, axes=axes, frequencies=tuple(frequencies.tolist()), scale=scale
    )
