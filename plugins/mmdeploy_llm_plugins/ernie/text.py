"""ERNIE 4.5 text models: the standard decoder with interleaved rotary pairs, dense or sparse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.hooks import MediaSpan
from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    MoEConfig,
    RotaryConfig,
    refuse_unread,
)
from mmdeploy_llm.weights.map import WeightMap

from .draft import KEYS

OWN_KEYS = (
    "mlp_layer_types",
    "moe_intermediate_size",
    "moe_k",
    "moe_layer_end_index",
    "moe_layer_interval",
    "moe_layer_start_index",
    "moe_norm_min",
    "moe_num_experts",
    "moe_num_shared_experts",
    "use_bias",
)
# KEYS: draft layers, which are used on demand.
IGNORED = (KEYS, r"rotary_emb\.inv_freq$")


class ErnieForCausalLM(CausalLM):
    """transformers' Ernie4_5ForCausalLM and Ernie4_5_MoeForCausalLM."""

    def __init__(self, config: Any) -> None:
        is_moe = config.model_type == "ernie4_5_moe"
        decoder = decoder_config(config)
        super().__init__(with_experts(decoder, config) if is_moe else decoder)
        bias = r"\.mlp\.(gate\.)?moe_statics\.e_score_correction_bias$"
        self.weight_map = WeightMap(
            self,
            renames=((bias, ".mlp.gate.correction_bias"),),
            ignored=(*IGNORED, "^lm_head") if decoder.is_tied else IGNORED,
        )

    def positions(self, num_tokens: int, media: Sequence[MediaSpan]) -> Tensor | None:
        """Returns None: token i is at position i."""
        return None


def decoder_config(config: Any) -> DecoderConfig:
    """Builds the dense decoder config of an ERNIE text config. Raises ModelNotSupportedError for
    options that no published model uses."""
    rope = config.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise ModelNotSupportedError(
            f"rope_type {rope['rope_type']!r} of this ERNIE model is not supported, only 'default'"
        )
    if config.hidden_act != "silu":
        raise ModelNotSupportedError(
            f"hidden_act {config.hidden_act!r} of this ERNIE model is not supported, only 'silu'"
        )
    refuse_unread(config, OWN_KEYS)
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    has_bias = bool(config.use_bias)
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        rotary=RotaryConfig(head_dim=head_dim, theta=rope["rope_theta"], is_interleaved=True),
        norm_eps=config.rms_norm_eps,
        qkv_bias=has_bias,
        out_bias=has_bias,
        mlp_bias=has_bias,
        is_tied=config.tie_word_embeddings,
    )


def with_experts(decoder: DecoderConfig, config: Any) -> DecoderConfig:
    """Adds the experts of an ernie4_5_moe config, whose head has a bias where the layers do."""
    if decoder.mlp_bias and decoder.is_tied:
        raise ModelNotSupportedError(
            "use_bias of this ernie4_5_moe model is not supported with tie_word_embeddings: its "
            "head would have a bias of its own"
        )
    layers = range(config.moe_layer_start_index, config.moe_layer_end_index + 1)
    moe = MoEConfig(
        num_experts=config.moe_num_experts,
        top_k=config.moe_k,
        intermediate_size=config.moe_intermediate_size,
        norm_min=config.moe_norm_min,
        shared_size=config.moe_intermediate_size * config.moe_num_shared_experts,
        shared_bias=decoder.mlp_bias,
    )
    chosen = (layer for layer in layers if (layer + 1) % config.moe_layer_interval == 0)
    chosen_layers = frozenset(chosen)
    return replace(decoder, moe=moe, moe_layers=chosen_layers, head_bias=decoder.mlp_bias)
