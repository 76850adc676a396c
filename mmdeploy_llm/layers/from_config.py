"""Converts transformers' configs to ours, for the fields that the text configs of most families
share."""

from __future__ import annotations

from typing import Any

import torch

from mmdeploy_llm.basic_layers.rotary import RotaryConfig
from mmdeploy_llm.errors import ModelNotSupportedError

from .decoder_config import DecoderConfig

# Scaled variants whose frequencies are the same for every sequence length.
# "dynamic" changes beyond max_position_embeddings only, where no sequence may go.
STATIC_ROPE_TYPES = ("dynamic", "linear", "llama3", "yarn")
LONG_ROPE_TYPE = "longrope"  # has frequencies for short and for long sequences


def standard_decoder(
    config: Any, rotary: RotaryConfig | None = None, *, intermediate_size: int | None = None
) -> DecoderConfig:
    """Converts the sizes of a text config, without biases, windows or experts. rotary: default
    rotary_config(config). intermediate_size: of dense layers; None: the config's. A family adds its
    options with dataclasses.replace.

    Raises ModelNotSupportedError for activations other than silu.
    """
    if config.hidden_act != "silu":
        raise ModelNotSupportedError(
            f"hidden_act {config.hidden_act!r} of this {config.model_type} model is not "
            "supported, only 'silu'"
        )
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size or config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        rotary=rotary_config(config) if rotary is None else rotary,
        norm_eps=config.rms_norm_eps,
        # The text config inside a multimodal config may not have the field.
        is_tied=getattr(config, "tie_word_embeddings", False),
    )


def sparse_layers(config: Any) -> frozenset[int]:
    """Returns the layers with experts: every decoder_sparse_step-th, without mlp_only_layers."""
    step, layers = config.decoder_sparse_step, range(config.num_hidden_layers)
    return frozenset(i for i in layers if (i + 1) % step == 0) - {*config.mlp_only_layers}


def rotary_config(
    config: Any, *, axes: tuple[int, ...] | None = None, is_interleaved: bool = False
) -> RotaryConfig:
    """Converts the config's rope_parameters; transformers computes the frequencies of scaled
    variants.

    Raises ModelNotSupportedError for variants whose frequencies change with every length.
    """
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    # Also in the default rope of families whose class in transformers ignores it: a checkpoint that
    # states it was trained with it, and other engines apply it.
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    scale, frequencies, long_frequencies, long_after = 1.0, None, None, None
    if kind in STATIC_ROPE_TYPES:
        frequencies, scale = _scaled(config, kind)
    elif kind == LONG_ROPE_TYPE:
        long_after = int(rope["original_max_position_embeddings"])
        frequencies, scale = _scaled(config, kind)
        long_frequencies, _ = _scaled(config, kind, seq_len=long_after + 1)
    elif kind != "default":
        raise ModelNotSupportedError(
            f"rope_type {kind!r} is not supported, only default, "
            f"{', '.join(STATIC_ROPE_TYPES)}, {LONG_ROPE_TYPE}"
        )
    return RotaryConfig(
        head_dim=head_dim,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        theta=rope["rope_theta"],
        is_interleaved=is_interleaved,
        axes=axes,
        frequencies=frequencies,
        scale=scale,
        long_frequencies=long_frequencies,
        long_after=long_after,
    )


def _scaled(
    config: Any, kind: str, *, seq_len: int | None = None
) -> tuple[tuple[float, ...], float]:
    """Returns transformers' frequencies and factor of a scaled variant, for sequences of seq_len
    tokens where they depend on it."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    with torch.device("cpu"):  # the model itself is built on "meta"
        values, scale = ROPE_INIT_FUNCTIONS[kind](config, device="cpu", seq_len=seq_len)
    return tuple(values.tolist()), float(scale)


def layer_windows(config: Any) -> tuple[int | None, ...] | None:
    """Returns DecoderConfig.windows from the config's layer_types and sliding_window; None when no
    layer has a window. Without layer_types the sliding_window applies to every layer.

    Raises ModelNotSupportedError for other types of layers, and for a window without a size.
    """
    size = config.sliding_window
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (int(size),) * config.num_hidden_layers if size else None
    unknown = sorted({*kinds} - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelNotSupportedError(
            f"layer_types {', '.join(unknown)} of this {config.model_type} model are not "
            "supported, only full_attention and sliding_attention"
        )
    if "sliding_attention" not in kinds:
        return None
    if not size:
        raise ModelNotSupportedError(
            f"layer_types of this {config.model_type} model name sliding_attention, but "
            f"sliding_window is {size!r}; it must be a number of tokens"
        )
    return tuple(int(size) if kind == "sliding_attention" else None for kind in kinds)
