"""The text models of InternVL: Qwen2 in version 3, Qwen3 with or without experts in version 3.5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    DecoderConfig,
    MoEConfig,
    layer_windows,
    sparse_layers,
    standard_decoder,
)

EXPERT_KEYS = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
)
KINDS = ("qwen2", "qwen3", "qwen3_moe")


def decoder_config(text: Any, *, is_tied: bool) -> DecoderConfig:
    """Converts a text config. Raises ModelNotSupportedError for one of another family."""
    kind = text.model_type
    if kind not in KINDS:
        raise ModelNotSupportedError(
            f"the text model {kind!r} of this InternVL checkpoint is not supported, only "
            f"{', '.join(KINDS)}; LLM(blocked_plugins=('internvl',)) serves it with transformers' "
            "own model"
        )
    has_biases = kind == "qwen2" or text.attention_bias
    decoder = replace(
        standard_decoder(text, own=EXPERT_KEYS),
        windows=layer_windows(text),
        is_tied=is_tied,
        qkv_bias=has_biases,
        out_bias=kind != "qwen2" and has_biases,
        qk_norm=kind != "qwen2",
    )
    return _with_experts(decoder, text) if kind == "qwen3_moe" else decoder


def _with_experts(decoder: DecoderConfig, text: Any) -> DecoderConfig:
    """Adds the experts of Qwen3-MoE to the layers that the config makes sparse."""
    moe = MoEConfig(
        num_experts=text.num_experts,
        top_k=text.num_experts_per_tok,
        intermediate_size=text.moe_intermediate_size,
        router="softmax",
        is_normed=text.norm_topk_prob,
    )
    return replace(decoder, moe=moe, moe_layers=sparse_layers(text))
