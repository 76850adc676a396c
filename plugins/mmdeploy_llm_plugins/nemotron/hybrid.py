"""Nemotron-H: each layer is one norm and one of Mamba-2, attention without positions, a plain MLP,
or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmdeploy_llm.caches import LayerCache, PagedKV
from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    MLP,
    Attention,
    CausalLM,
    DecoderConfig,
    DecoderStep,
    Mamba2,
    Mamba2Config,
    RotaryConfig,
    refuse_unread,
)
from mmdeploy_llm.weights.map import WeightMap

from .experts import NemotronMoE

MAMBA, ATTENTION, PLAIN, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu")
OWN_KEYS = (
    "chunk_size",  # of a kernel: changes no result
    "conv_kernel",
    "expand",  # heads times their size
    "layer_types",
    "layers_block_type",
    "mamba_head_dim",
    "mamba_hidden_act",
    "mamba_num_heads",
    "mamba_proj_bias",  # not read by transformers: use_bias is
    "mamba_ssm_cache_dtype",  # states are kept in float32
    "mlp_bias",
    "mlp_hidden_act",
    "moe_intermediate_size",
    "moe_latent_size",
    "moe_shared_expert_intermediate_size",
    "moe_shared_expert_overlap",
    "mtp_layers_block_type",
    "n_group",
    "n_groups",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "num_local_experts",
    "num_logits_to_keep",  # of transformers' generate
    "num_nextn_predict_layers",
    "rescale_prenorm_residual",  # of its initialisation
    "routed_scaling_factor",
    "ssm_state_size",
    "time_step_floor",  # as the next but one: of its initialisation
    "time_step_limit",  # not read by transformers: time_step_min is
    "time_step_max",
    "time_step_min",
    "topk_group",
    "use_bias",
    "use_conv_bias",
    "use_mamba_kernels",
)
# From the published names and transformers' to ours.
RENAMES = (
    (r"^(?:backbone|model)\.embeddings?\.", "model.embed_tokens."),
    (r"^(?:backbone|model)\.norm_f\.", "model.norm."),
    (r"^backbone\.", "model."),
    (r"\.mixer\.experts\.up_proj$", ".mixer.experts.gate_up_proj"),
    (r"\.mixer\.(shared_experts\.)?up_proj\.", r".mixer.\1fc1."),
    (r"\.mixer\.(shared_experts\.)?down_proj\.", r".mixer.\1fc2."),
)


class NemotronLayer(nn.Module):
    """One norm and one mixer."""

    def __init__(self, config: DecoderConfig, layer: int, *, text: Any) -> None:
        """text: transformers' config."""
        super().__init__()
        self.kind = text.layers_block_type[layer]
        self.norm = config.new_norm(config.hidden_size)
        place = sum(_is_cached(kind) for kind in text.layers_block_type[:layer])
        self.mixer = _mixer(config, text, self.kind, place)

    def forward(
        self, x: Tensor, residual: Tensor | None, step: DecoderStep
    ) -> tuple[Tensor, Tensor]:
        """Returns (output, residual stream), both [T, hidden], not yet added."""
        x, residual = self.norm.add(x, residual)
        if self.kind == MAMBA:
            assert step.states is not None, "the model has a cache with states"
            return self.mixer(x, step.states), residual
        return self.mixer(x, step) if self.kind == ATTENTION else self.mixer(x), residual


class NemotronHForCausalLM(CausalLM):
    """transformers' NemotronHForCausalLM. Layers that keep nothing of a sequence are not among
    those of its cache."""

    def __init__(self, config: Any) -> None:
        decoder = decoder_config(config)
        super().__init__(decoder, partial(NemotronLayer, text=config))
        self.cache = layer_cache(config)
        self.num_layers = len(self.cache)
        ignored = [r"^mtp\.", *(("^lm_head",) if decoder.is_tied else ())]
        self.weight_map = WeightMap(self, renames=RENAMES, ignored=ignored)


def decoder_config(config: Any) -> DecoderConfig:
    """Converts the config. Raises ModelNotSupportedError for options that it has no layers for."""
    refuse_unread(config, OWN_KEYS)
    for name, allowed in (
        ("mamba_hidden_act", ("silu",)),
        ("mlp_hidden_act", ACTIVATIONS),
        ("residual_in_fp32", (False,)),
    ):
        if getattr(config, name) not in allowed:
            raise ModelNotSupportedError(
                f"{name} {getattr(config, name)!r} of this {config.model_type} model is not "
                f"supported, only {', '.join(map(repr, allowed))}"
            )
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=len(config.layers_block_type),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        # Angles of 0 rotate nothing.
        rotary=RotaryConfig(head_dim=config.head_dim, frequencies=(0.0,) * (config.head_dim // 2)),
        norm_eps=config.layer_norm_epsilon,
        rounds_norms_late=True,
        is_tied=config.tie_word_embeddings,
    )


def layer_cache(config: Any) -> Sequence[LayerCache]:
    """Returns what the layers with attention and Mamba-2 keep."""
    paged = PagedKV(num_kv_heads=config.num_key_value_heads, head_dim=config.head_dim)
    state = _mamba_config(config).state
    kinds = [kind for kind in config.layers_block_type if _is_cached(kind)]
    return tuple(state if kind == MAMBA else paged for kind in kinds)


def _is_cached(kind: str) -> bool:
    return kind in (MAMBA, ATTENTION)


def _mixer(config: DecoderConfig, text: Any, kind: str, place: int) -> nn.Module:
    """place: of the layer in the cache."""
    if kind == MAMBA:
        return Mamba2(_mamba_config(text), place)
    if kind == ATTENTION:
        return Attention(config, place)
    if kind == EXPERTS:
        return NemotronMoE(text)
    size, inner = text.hidden_size, text.intermediate_size
    return MLP(size, inner, size, text.mlp_hidden_act, bias=text.mlp_bias)


def _mamba_config(config: Any) -> Mamba2Config:
    return Mamba2Config(
        hidden_size=config.hidden_size,
        num_heads=config.mamba_num_heads,
        head_dim=config.mamba_head_dim,
        state_size=config.ssm_state_size,
        num_groups=config.n_groups,
        kernel_size=config.conv_kernel,
        norm_eps=config.layer_norm_epsilon,
        conv_bias=config.use_conv_bias,
        bias=config.use_bias,
        # As transformers does for prompts; for single tokens it knows no limit.
        time_step_limit=(config.time_step_min, float("inf")),
    )
