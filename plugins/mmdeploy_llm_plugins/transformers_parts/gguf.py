"""Reads GGUF files of architectures that have no plugin: those which llama.cpp's converter
(conversion/*.py) only renames, so that the names of the package `gguf` are all it takes.

The converter reorders, joins or shifts the weights of other architectures. A file of such a one
would load without an error and answer nonsense; it needs a table that says what was done.
"""

from __future__ import annotations

from mmdeploy_llm.weights.gguf.tables import (
    GGUFTable,
    Metadata,
    TextModel,
    Values,
    has_biases,
    head_dim,
    num_layers,
    rope_parameters,
)


def _windows(metadata: Metadata) -> Values:
    """Returns the fields of layers with windows; all layers attend to everything where the file
    states none."""
    count, slides = num_layers(metadata), metadata.values("attention.sliding_window_pattern")
    if not metadata.has("attention.sliding_window"):
        return {"layer_types": ["full_attention"] * count, "sliding_window": None}
    if slides is None or len(slides) != count:
        raise metadata.wrong("attention.sliding_window_pattern", f"{count} values")
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "sliding_window": metadata.whole("attention.sliding_window"),
    }


def _starcoder2(metadata: Metadata) -> Values:
    return {
        "norm_epsilon": metadata.number("attention.layer_norm_epsilon"),
        "use_bias": has_biases(metadata, "attn_q"),
        "sliding_window": None,  # no metadata tell; the published models have as many positions
    }


def _seed_oss(metadata: Metadata) -> Values:
    return {
        "attention_bias": has_biases(metadata, "attn_q"),
        "attention_out_bias": has_biases(metadata, "attn_output"),
        "mlp_bias": has_biases(metadata, "ffn_up"),
    }


def _olmo(metadata: Metadata) -> Values:
    """Describes version 2, or version 3, which has windows, and scales positions beyond them
    only."""
    bias = {"attention_bias": has_biases(metadata, "attn_q")}
    if not metadata.has("attention.sliding_window"):
        return bias
    whole = rope_parameters(metadata, head_dim(metadata))
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        **_windows(metadata),
        **bias,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": whole["rope_theta"]},
            "full_attention": whole,
        },
    }


def _cohere(metadata: Metadata) -> Values:
    return {
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "logit_scale": metadata.number("logit_scale"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.tensors,
        "attention_bias": has_biases(metadata, "attn_q"),
    }


def _phi(metadata: Metadata) -> Values:
    return {
        "layer_norm_eps": metadata.number("attention.layer_norm_epsilon"),
        "qk_layernorm": False,
        "rope_parameters": {
            "partial_rotary_factor": 1.0,  # unless the file states fewer channels than a head has
            **rope_parameters(metadata, head_dim(metadata)),
        },
    }


TABLE = GGUFTable(
    models={
        "starcoder2": TextModel(
            model_type="starcoder2",
            model="Starcoder2ForCausalLM",
            config=_starcoder2,
            has_rms_norm=False,
        ),
        "seed_oss": TextModel(model_type="seed_oss", model="SeedOssForCausalLM", config=_seed_oss),
        "olmo2": TextModel(model_type="olmo2", model="Olmo2ForCausalLM", config=_olmo),
        "command-r": TextModel(
            model_type="cohere", model="CohereForCausalLM", config=_cohere, has_rms_norm=False
        ),
        "exaone4": TextModel(model_type="exaone4", model="Exaone4ForCausalLM", config=_windows),
        "phi2": TextModel(
            model_type="phi", model="PhiForCausalLM", config=_phi, has_rms_norm=False
        ),
    }
)
