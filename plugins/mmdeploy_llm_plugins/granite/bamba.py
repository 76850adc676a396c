"""Bamba: Mamba-2 in most layers and attention in the others, each followed by a gated MLP."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    refuse_unread,
    rotary_config,
    standard_decoder,
)
from mmdeploy_llm.weights.map import WeightMap

from .hybrid import GraniteLayer, check_activation, layer_cache

OWN_KEYS = (
    "attention_bias",
    "attn_layer_indices",
    "layer_types",
    "layers_block_type",
    "mamba_chunk_size",  # of a kernel: changes no result
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",  # heads times their size, which transformers' config checks
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_proj_bias",
    "mlp_bias",
    "num_logits_to_keep",  # of transformers' generate
    "time_step_limit",
    "z_loss_coefficient",  # of its training
)
RENAMES = (
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"^model\.final_layernorm\.", "model.norm."),
)


class BambaForCausalLM(CausalLM):
    """transformers' BambaForCausalLM."""

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config)
        super().__init__(decoder, partial(GraniteLayer, text=config))
        self.cache = layer_cache(decoder, config)
        ignored = ("^lm_head",) if decoder.is_tied else ()
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)


def decoder_config(config: Any) -> DecoderConfig:
    """Converts the config."""
    refuse_unread(config, OWN_KEYS)
    check_activation(config)
    return replace(
        standard_decoder(config, rotary_config(config)),
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
    )
