"""Gemma text models: the standard decoder with norms that multiply by 1 + weight, scaled embeddings
and tanh-GELU.

version  norms after attention and MLP   q and k norms   scores and logits   local layers
1        no                              no              no                  no
2        yes                             no              soft caps           every second
3        yes                             yes             cap of logits       most, with another rope
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    layer_rotaries,
    layer_windows,
    refuse_unread,
)
from mmdeploy_llm.weights.map import WeightMap

OWN_KEYS = (
    "attention_bias",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "layer_types",
    "query_pre_attn_scalar",
    "sliding_window",
    "sliding_window_pattern",
    "use_bidirectional_attention",
)
ACTIVATION: Final = "gelu_pytorch_tanh"
# From the published names of versions 2 and 3 to ours, whose norms are named by what they follow.
RENAMES = (
    (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
    (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm."),
    (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
)


class GemmaForCausalLM(CausalLM):
    """transformers' GemmaForCausalLM, Gemma2ForCausalLM and Gemma3ForCausalLM."""

    def __init__(self, config: Any, *, is_tied: bool | None = None) -> None:
        """config: the text config. is_tied: None: as it says."""
        decoder = decoder_config(config)
        decoder = decoder if is_tied is None else replace(decoder, is_tied=is_tied)
        super().__init__(decoder)
        if _is_bidirectional(config):  # EmbeddingGemma
            self.is_bidirectional = True
        ignored = ("^lm_head",) if decoder.is_tied else ()
        renames = RENAMES if decoder.post_norms else ()
        self.weight_map = WeightMap(self, renames=renames, ignored=ignored)


def decoder_config(config: Any) -> DecoderConfig:
    """Converts the config of one of the versions. Raises ModelNotSupportedError for another
    activation."""
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation != ACTIVATION:
        raise ModelNotSupportedError(
            f"hidden_activation {activation!r} of this {config.model_type} model is not "
            f"supported, only {ACTIVATION!r}"
        )
    refuse_unread(config, OWN_KEYS)
    is_first = config.model_type == "gemma"
    rotary, local = layer_rotaries(config)
    scalar = getattr(config, "query_pre_attn_scalar", config.head_dim)
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        rotary=rotary,
        local_rotary=local,
        norm_eps=config.rms_norm_eps,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        is_tied=config.tie_word_embeddings,
        qk_norm=config.model_type == "gemma3_text",
        zero_centered_norms=True,
        post_norms=not is_first,
        windows=None if is_first else _windows(config),
        activation=ACTIVATION,
        embed_scale=config.hidden_size**0.5,
        score_scale=scalar**-0.5,
        # Version 3 has the field, and transformers' attention does not read it.
        score_softcap=config.attn_logit_softcapping if config.model_type == "gemma2" else None,
        logit_softcap=getattr(config, "final_logit_softcapping", None),
    )


def _is_bidirectional(config: Any) -> bool:
    return bool(getattr(config, "use_bidirectional_attention", None))


def _windows(config: Any) -> tuple[int | None, ...] | None:
    """Returns the window of each layer. Where attention has both directions, transformers' config
    holds how far a token sees to each side, itself included; ours is both sides together."""
    windows = layer_windows(config)
    if windows is None or not _is_bidirectional(config):
        return windows
    return tuple(None if window is None else 2 * (window - 1) for window in windows)
