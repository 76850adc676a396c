"""Converts transformers' configs to ours, for the fields that the text configs of most families
share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.kernels.plain import ACTIVATIONS
from mmdeploy_llm.layers.basic.mlp import AnyActivation
from mmdeploy_llm.layers.basic.rotary import RotaryConfig
from mmdeploy_llm.layers.basic.scaled_rope import (
    LONG_ROPE_TYPE,
    STATIC_ROPE_TYPES,
    long_after,
    scaled_frequencies,
)

from .config_reader import ConfigReader
from .decoder_config import DecoderConfig

# Field of DecoderConfig -> keys of configs, the first one that is there counts.
KEYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {each.name: each.metadata["keys"] for each in fields(DecoderConfig)}
)
SIZES = ("vocab_size", "hidden_size", "num_layers", "num_heads")
BASE = (*SIZES, "num_kv_heads", "intermediate_size", "rotary", "norm_eps", "activation", "is_tied")
LAYER_NORM_KEYS = KEYS["norm_eps"][2:]
# transformers' names of activations -> ours.
ACTIVATION_NAMES: Mapping[str, AnyActivation] = MappingProxyType(
    {
        **{name: name for name in ACTIVATIONS},
        "gelu_fast": "gelu_pytorch_tanh",
        "gelu_new": "gelu_pytorch_tanh",
        "gelu_python": "gelu",
        "swish": "silu",
    }
)


def standard_decoder(
    config: Any,
    rotary: RotaryConfig | None = None,
    *,
    intermediate_size: int | None = None,
    own: Collection[str] | None = None,
) -> DecoderConfig:
    """Converts a text config of any family of the standard decoder, with RMSNorms or LayerNorms. A
    family adds with dataclasses.replace what no config says; docs/decoder_options.md is the table
    of fields and keys.

    rotary: default rotary_config(config). intermediate_size: of dense layers; None: the config's.
    own: keys that the family reads itself, that of an unknown activation among them. Where it is
        given, also as (), biases, windows, factors and all other keys of the table are read, and
        every other key of the config's class that switches something on is refused by name. None:
        the family looks after all keys, and only sizes, norms, activation and ties are read.

    Raises ModelNotSupportedError for what the standard decoder does not implement.
    """
    reader = ConfigReader(config)
    eps, is_layer_norm = _norm(reader)
    rotary, local = _rotaries(reader) if rotary is None else (rotary, None)
    reader.first(*KEYS["rotary"], *KEYS["intermediate_size"])
    decoder = DecoderConfig(
        **{name: _required(reader, name) for name in SIZES},
        intermediate_size=intermediate_size or _required(reader, "intermediate_size"),
        num_kv_heads=reader.option(*KEYS["num_kv_heads"]) or config.num_attention_heads,
        rotary=rotary,
        norm_eps=eps,
        layer_norms=is_layer_norm,
        has_norm_biases=is_layer_norm,
        activation=_activation(reader, own or ()),
        # The text config inside a multimodal config may not have the field.
        is_tied=bool(reader.first(*KEYS["is_tied"], default=False)),
    )
    if own is None:
        return decoder
    decoder = replace(decoder, local_rotary=local, **_options(reader))
    reader.refuse_unread(own)
    return decoder


def refuse_unread(config: Any, read: Collection[str]) -> None:
    """Refuses by name what a config's class declares and switches on, for families that read their
    config themselves. read: the keys that they read beside sizes, norms, positions, activation and
    ties. Raises ModelNotSupportedError."""
    reader = ConfigReader(config)
    reader.first(*(key for name in BASE for key in KEYS[name]))
    reader.refuse_unread(read)


def unread_keys(config: Any) -> dict[str, Any]:
    """Returns the keys that standard_decoder(config, own=()) refuses, with their values."""
    reader = ConfigReader(config)
    reader.first(*(key for keys in KEYS.values() for key in keys))
    return reader.unread(())


def _options(reader: ConfigReader) -> dict[str, Any]:
    """Returns the fields of DecoderConfig whose defaults a config may change."""
    flags = ("qkv_bias", "out_bias", "mlp_bias", "head_bias", "is_parallel")
    values = ("score_softcap", "logit_softcap", "embed_scale", "residual_scale")
    found = {name: reader.option(*KEYS[name]) for name in (*flags, *values)}
    scale = reader.option("logit_scale", default=1.0)
    scalar = reader.option("query_pre_attn_scalar")
    score = reader.option("attention_multiplier")
    return {
        **{name: value for name, value in found.items() if value is not None},
        "logit_scale": scale / reader.option("logits_scaling", default=1.0),
        "score_scale": scalar**-0.5 if score is None and scalar else score,
        "windows": _windows(reader),
        "nope_layers": _nope_layers(reader),
    }


def _windows(reader: ConfigReader) -> tuple[int | None, ...] | None:
    """Returns layer_windows, of a config whose class has layer_types or a window."""
    reader.option(*KEYS["windows"])
    has_any = any(reader.declares(key) for key in KEYS["windows"])
    return layer_windows(reader.config) if has_any else None


def _required(reader: ConfigReader, name: str) -> Any:
    """Returns the value of a field that has no default. Raises ModelNotSupportedError without."""
    value = reader.first(*KEYS[name])
    if value is None:
        raise ModelNotSupportedError(
            f"the config of this {reader.config.model_type} model has none of "
            f"{', '.join(KEYS[name])}, from which the standard decoder reads {name}"
        )
    return value


def _norm(reader: ConfigReader) -> tuple[float, bool]:
    """Returns the epsilon of the norms, and whether they are LayerNorms, which its name tells. A
    config without one has LayerNorms with torch's epsilon."""
    key = reader.name(KEYS["norm_eps"])
    eps = reader.first(*KEYS["norm_eps"], default=1e-5)
    return float(eps), key is None or key in LAYER_NORM_KEYS


def _activation(reader: ConfigReader, own: Collection[str]) -> AnyActivation:
    """Returns our name of the activation. Raises ModelNotSupportedError for an unknown one, unless
    it is the family's own: then its layers have other MLPs than those of the decoder."""
    keys = KEYS["activation"]
    key, name = reader.name(keys), reader.first(*keys, default="silu")
    found = ACTIVATION_NAMES.get(name)
    if found is None and key in own:
        return "silu"
    if found is None:
        raise ModelNotSupportedError(
            f"{key} {name!r} of this {reader.config.model_type} model is not supported, only "
            f"{', '.join(sorted(ACTIVATION_NAMES))}; a family whose MLPs compute it names "
            f"{key!r} in `own` of standard_decoder"
        )
    return found


def _nope_layers(reader: ConfigReader) -> frozenset[int]:
    """Returns the layers without rotary embedding: from a list that has 1 for each layer with one,
    or every n-th layer."""
    has_rope = reader.option("no_rope_layers")
    interval = reader.option("no_rope_layer_interval")
    layers = range(reader.config.num_hidden_layers)
    if has_rope:
        return frozenset(layer for layer in layers if not has_rope[layer])
    return frozenset(layer for layer in layers if interval and (layer + 1) % interval == 0)


def _rotaries(reader: ConfigReader) -> tuple[RotaryConfig, RotaryConfig | None]:
    """Returns layer_rotaries. Raises ModelNotSupportedError for a config without rotary
    embedding."""
    if not reader.first("rope_parameters"):
        raise ModelNotSupportedError(
            f"the config of this {reader.config.model_type} model has no rope_parameters: learned "
            "and other positions are not supported"
        )
    return layer_rotaries(reader.config)


def layer_rotaries(config: Any) -> tuple[RotaryConfig, RotaryConfig | None]:
    """Returns the rotary embedding of layers without a window, and that of layers with one where
    rope_parameters have both."""
    rope = config.rope_parameters
    is_interleaved = bool(getattr(config, "rope_interleave", False))
    if "full_attention" not in rope:
        return rotary_config(config, is_interleaved=is_interleaved), None

    return (
        _rotary(config, is_interleaved=is_interleaved, layers="full_attention"),
        _rotary(config, is_interleaved=is_interleaved, layers="sliding_attention"),
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
    return _rotary(config, axes=axes, is_interleaved=is_interleaved)


def _rotary(
    config: Any,
    *,
    axes: tuple[int, ...] | None = None,
    is_interleaved: bool = False,
    layers: str | None = None,
) -> RotaryConfig:
    rope = config.rope_parameters if layers is None else config.rope_parameters[layers]
    kind = rope.get("rope_type", "default")
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    # Also in the default rope of families whose class in transformers ignores it: a checkpoint that
    # states it was trained with it, and other engines apply it.
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    scale, frequencies, long_frequencies, after = 1.0, None, None, None
    if kind in STATIC_ROPE_TYPES:
        frequencies, scale = scaled_frequencies(config, kind, layers=layers)
    elif kind == LONG_ROPE_TYPE:
        after = long_after(rope)
        frequencies, scale = scaled_frequencies(config, kind, layers=layers)
        long_frequencies, _ = scaled_frequencies(config, kind, layers=layers, seq_len=after + 1)
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
        long_after=after,
    )


def layer_windows(config: Any) -> tuple[int | None, ...] | None:
    """Returns DecoderConfig.windows from the config's layer_types and sliding_window; None when no
    layer has a window. Without layer_types the sliding_window applies to every layer.

    Raises ModelNotSupportedError for other types of layers, and for a window without a size.
    """
    size = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        size = size if getattr(config, "use_sliding_window", True) else None
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
