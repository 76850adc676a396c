"""Granite 4: Mamba-2 in most layers and attention in the others, dense or with experts beside a
shared MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from mmdeploy_llm.caches import LayerCache, PagedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    CausalLM,
    DecoderConfig,
    DecoderLayer,
    DecoderStep,
    Mamba2,
    Mamba2Config,
    MoEConfig,
    RotaryConfig,
    refuse_unread,
    rotary_config,
    standard_decoder,
)
from mmdeploy_llm.weights.map import WeightMap

from .text import with_factors

OWN_KEYS = (
    "attention_bias",
    "attention_multiplier",
    "embedding_multiplier",
    "layer_types",
    "layers_block_type",
    "logits_scaling",
    "mamba_chunk_size",  # of a kernel: changes no result
    "mamba_conv_bias",
    "mamba_d_conv",
    "mamba_d_head",
    "mamba_d_state",
    "mamba_expand",  # heads times their size, which transformers' config checks
    "mamba_n_groups",
    "mamba_n_heads",
    "mamba_proj_bias",
    "num_experts_per_tok",
    "num_local_experts",
    "position_embedding_type",
    "residual_multiplier",
    "shared_intermediate_size",
    "time_step_limit",
)
# From the names of published checkpoints, and of transformers' modules, to ours.
EXPERTS = (
    (r"\.shared_mlp\.input_linear\.", ".mlp.shared_experts.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.shared_experts.down_proj."),
    (r"\.block_sparse_moe\.input_linear\.weight$", ".mlp.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight$", ".mlp.experts.down_proj"),
    (r"\.block_sparse_moe\.experts\.", ".mlp.experts."),
    (r"\.block_sparse_moe\.router\.(?:layer\.)?weight$", ".mlp.gate.weight"),
)
DENSE = (
    (r"\.shared_mlp\.input_linear\.", ".mlp.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".mlp.down_proj."),
)


class GraniteLayer(DecoderLayer):
    """A decoder layer that mixes tokens by Mamba-2 or by attention."""

    def __init__(self, config: DecoderConfig, layer: int, *, text: Any) -> None:
        """text: transformers' config."""
        self._text = text
        self._is_mamba = is_mamba(text)[layer]
        super().__init__(config, layer)

    def add_mixer(self, config: DecoderConfig, layer: int) -> None:
        """See DecoderLayer."""
        if self._is_mamba:
            self.mamba = Mamba2(mamba_config(self._text), layer)
        else:
            super().add_mixer(config, layer)

    def mix(self, x: Tensor, step: DecoderStep) -> Tensor:
        """See DecoderLayer."""
        if not self._is_mamba:
            return super().mix(x, step)
        assert step.states is not None, "the model has a cache with states"
        out: Tensor = self.mamba(x, step.states)
        return out


class GraniteHybridForCausalLM(CausalLM):
    """transformers' GraniteMoeHybridForCausalLM."""

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config)
        super().__init__(decoder, partial(GraniteLayer, text=config))
        self.cache = layer_cache(decoder, config)
        renames = EXPERTS if decoder.moe else DENSE
        ignored = ("^lm_head",) if decoder.is_tied else ()
        self.weight_map = WeightMap(self, renames=renames, ignored=ignored)


def decoder_config(config: Any) -> DecoderConfig:
    """Converts the config. Without experts the shared MLP is the only one."""
    if config.position_embedding_type == "rope":
        rotary = rotary_config(config)
    else:  # angles of 0 rotate nothing
        head_dim = config.hidden_size // config.num_attention_heads
        rotary = RotaryConfig(head_dim=head_dim, frequencies=(0.0,) * (head_dim // 2))
    refuse_unread(config, OWN_KEYS)
    check_activation(config)
    shared = config.shared_intermediate_size
    decoder = standard_decoder(config, rotary, intermediate_size=shared)
    decoder = replace(with_factors(decoder, config), out_bias=config.attention_bias)
    if not config.num_local_experts:
        return decoder
    moe = MoEConfig(
        num_experts=config.num_local_experts,
        top_k=config.num_experts_per_tok,
        intermediate_size=config.intermediate_size,
        router="softmax",
        shared_size=shared,
    )
    return replace(decoder, moe=moe, moe_layers=frozenset(range(decoder.num_layers)))


def check_activation(config: Any) -> None:
    """Raises ModelNotSupportedError for an activation that layers of Mamba-2 do not have."""
    if config.hidden_act != "silu" and any(is_mamba(config)):
        raise ModelNotSupportedError(
            f"hidden_act {config.hidden_act!r} of this {config.model_type} model is not supported, "
            "only 'silu'"
        )


def mamba_config(config: Any) -> Mamba2Config:
    """Converts the Mamba-2 layers of the config."""
    return Mamba2Config(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_n_heads,
        head_dim=config.mamba_d_head,
        state_size=config.mamba_d_state,
        num_groups=config.mamba_n_groups,
        kernel_size=config.mamba_d_conv,
        norm_eps=config.rms_norm_eps,
        conv_bias=config.mamba_conv_bias,
        bias=config.mamba_proj_bias,
        time_step_limit=tuple(config.time_step_limit),
    )


def is_mamba(config: Any) -> Sequence[bool]:
    """Returns whether each layer is Mamba-2."""
    return tuple(kind != "full_attention" for kind in config.layers_block_type)


def layer_cache(decoder: DecoderConfig, config: Any) -> Sequence[LayerCache]:
    """Returns what each layer keeps."""
    attention = PagedKV(num_kv_heads=decoder.num_kv_heads, head_dim=decoder.head_dim)
    state = mamba_config(config).state
    return tuple(state if mamba else attention for mamba in is_mamba(config))
