"""The table of decoder_options.md: every field of DecoderConfig, and families that use it."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import Any

from mmdeploy_llm.layers import DecoderConfig

# Fields that have a default -> families whose value is another one. A test compares the names.
FAMILIES = {
    "qkv_bias": "Qwen 2, GLM-4",
    "out_bias": "Seed-OSS",
    "mlp_bias": "StarCoder 2",
    "head_bias": "Phi 2",
    "qk_norm": "Qwen 3, Gemma 3, EXAONE 4",
    "has_full_qk_norm": "OLMo 2, OLMoE",
    "pre_norms": "false: OLMo 2, EXAONE 4",
    "post_norms": "GLM-4, Gemma 2, OLMo 2",
    "zero_centered_norms": "Gemma, Nemotron",
    "rounds_norms_late": "OLMo 2, Gemma 4, gpt-oss",
    "layer_norms": "Cohere, StarCoder 2, Stable LM",
    "has_norm_biases": "StarCoder 2, Stable LM; false: Cohere",
    "has_norm_weights": "false: OLMo",
    "is_parallel": "Cohere, Phi 2",
    "has_mlp_norm": "GPT-NeoX",
    "has_gate": "false: StarCoder 2, Nemotron, Arcee",
    "windows": "Mistral, Phi-3, Gemma 2, Cohere 2",
    "local_rotary": "Gemma 3",
    "nope_layers": "SmolLM3; the layers without a window of Cohere 2 and EXAONE 4",
    "embed_scale": "Gemma, Granite",
    "residual_scale": "Granite",
    "logit_scale": "Cohere, Granite",
    "score_scale": "Granite, Gemma 2",
    "score_softcap": "Gemma 2",
    "logit_softcap": "Gemma 2",
    "has_sinks": "gpt-oss",
    "moe": "Qwen 3 MoE, OLMoE",
    "moe_layers": "Qwen 3 MoE, OLMoE",
}
ALL = {"activation", "is_tied"}  # which many families set


def table() -> str:
    """Returns a row for each field: name, default, keys of configs, meaning and families."""
    rows = [
        "| field | default | key in config.json | meaning | families |",
        "|---|---|---|---|---|",
    ]
    for each in fields(DecoderConfig):
        keys = ", ".join(f"`{key}`" for key in each.metadata["keys"])
        cells = (f"`{each.name}`", default(each), keys, each.metadata["meaning"])
        rows.append(f"| {' | '.join(cells)} | {FAMILIES.get(each.name, '')} |")
    return "\n".join(rows) + "\n"


def default(each: Field[Any]) -> str:
    """Returns the default as it is written in Python."""
    if each.default is MISSING:
        return "required"
    return f"`{'{}' if each.default == frozenset() else repr(each.default)}`".replace("'", '"')
