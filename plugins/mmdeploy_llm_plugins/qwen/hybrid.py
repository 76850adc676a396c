"""The decoder of Qwen3.5: Gated DeltaNet in most layers, gated attention in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from mmdeploy_llm.caches import LayerCache, PagedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    DecoderConfig,
    DecoderLayer,
    DecoderStep,
    GatedAttention,
    GatedDeltaConfig,
    GatedDeltaNet,
    MoEConfig,
    RotaryConfig,
    refuse_unread,
    standard_decoder,
)

from .text import EXPERT_KEYS

OWN_KEYS = (
    *EXPERT_KEYS,
    "attention_bias",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
)
KINDS = ("linear_attention", "full_attention")


class HybridLayer(DecoderLayer):
    """A decoder layer that mixes tokens by Gated DeltaNet or by gated attention."""

    linear_attn: GatedDeltaNet | None

    def __init__(self, config: DecoderConfig, layer: int, *, text: Any) -> None:
        """text: transformers' text config."""
        self._is_linear = text.layer_types[layer] == "linear_attention"
        self._delta = delta_config(text)
        super().__init__(config, layer)

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """See DecoderLayer."""
        if self._is_linear:
            self.linear_attn = GatedDeltaNet(self._delta, layer)
        else:
            self.self_attn = GatedAttention(config, layer)

    def mix(self, x: Tensor, step: DecoderStep) -> Tensor:
        """See DecoderLayer."""
        if not self._is_linear:
            return super().mix(x, step)
        assert self.linear_attn is not None, "added in place of attention"
        assert step.states is not None, "the model has a cache with states"
        out: Tensor = self.linear_attn(x, step.states)
        return out


def delta_config(text: Any) -> GatedDeltaConfig:
    """Converts the linear attention of a text config."""
    return GatedDeltaConfig(
        hidden_size=text.hidden_size,
        num_key_heads=text.linear_num_key_heads,
        num_value_heads=text.linear_num_value_heads,
        key_head_dim=text.linear_key_head_dim,
        value_head_dim=text.linear_value_head_dim,
        kernel_size=text.linear_conv_kernel_dim,
        norm_eps=text.rms_norm_eps,
    )


def hybrid_decoder(text: Any, rotary: RotaryConfig, *, is_tied: bool) -> DecoderConfig:
    """Converts a text config, dense or with experts. Raises ModelNotSupportedError for layers of
    other kinds, and for another activation."""
    unknown = sorted({*text.layer_types} - {*KINDS})
    if unknown:
        raise ModelNotSupportedError(
            f"layer_types {', '.join(unknown)} of this {text.model_type} model are not supported, "
            f"only {' and '.join(KINDS)}"
        )
    refuse_unread(text, OWN_KEYS)
    if text.hidden_act != "silu":  # of the linear attention too
        raise ModelNotSupportedError(
            f"hidden_act {text.hidden_act!r} of this {text.model_type} model is not supported, "
            "only 'silu'"
        )
    if not hasattr(text, "intermediate_size"):
        return _with_experts(text, rotary, is_tied=is_tied)
    return _options(standard_decoder(text, rotary), text, is_tied=is_tied)


def _with_experts(text: Any, rotary: RotaryConfig, *, is_tied: bool) -> DecoderConfig:
    """Converts a text config whose layers are all sparse."""
    decoder = standard_decoder(text, rotary, intermediate_size=text.moe_intermediate_size)
    moe = MoEConfig(
        num_experts=text.num_experts,
        top_k=text.num_experts_per_tok,
        intermediate_size=text.moe_intermediate_size,
        router="softmax",
        shared_size=text.shared_expert_intermediate_size,
        is_shared_gated=True,
    )
    sparse = frozenset(range(decoder.num_layers))
    return replace(_options(decoder, text, is_tied=is_tied), moe=moe, moe_layers=sparse)


def _options(decoder: DecoderConfig, text: Any, *, is_tied: bool) -> DecoderConfig:
    return replace(
        decoder,
        qkv_bias=text.attention_bias,
        out_bias=text.attention_bias,
        qk_norm=True,
        zero_centered_norms=True,
        is_tied=is_tied,
    )


def new_layer(text: Any) -> Any:
    """Returns the layers.NewLayer of a text config."""
    return partial(HybridLayer, text=text)


def layer_cache(decoder: DecoderConfig, text: Any) -> Sequence[LayerCache]:
    """Returns what each layer keeps."""
    attention = PagedKV(num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim)
    state = delta_config(text).state
    return tuple(state if kind == KINDS[0] else attention for kind in text.layer_types)
