"""A row for each family: what its config and the names of its weights do not tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mmdeploy_llm.layers import MoEConfig

from .family import Family, Options, Rename
from .older import BLOOM, FALCON, GPT_NEO, MPT

PLAIN_MLP: Sequence[Rename] = ((r"\.up_proj\.", ".fc1."), (r"\.down_proj\.", ".fc2."))
NORMS_AFTER: Sequence[Rename] = (
    (r"\.post_attention_layernorm\.", ".post_self_attn_layernorm."),
    (r"\.post_feedforward_layernorm\.", ".post_mlp_layernorm."),
)


def _all_but_windows(config: Any) -> Options:
    """Layers without a window have no rotary embedding."""
    kinds = enumerate(config.layer_types)
    return {"nope_layers": frozenset(i for i, kind in kinds if kind == "full_attention")}


def _exaone4(config: Any) -> Options:
    return {} if config.sliding_window is None else _all_but_windows(config)


def _mixtral(config: Any) -> Options:
    return {
        "moe": MoEConfig(
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            intermediate_size=config.intermediate_size,
            router="softmax",
            rounds_weights=False,
        ),
        "moe_layers": frozenset(range(config.num_hidden_layers)),
    }


COHERE: Options = {"has_norm_biases": False, "is_parallel": True}
AFTER: Options = {"pre_norms": False, "post_norms": True}
OLMO2 = Family(
    options={**AFTER, "has_full_qk_norm": True, "rounds_norms_late": True}, renames=NORMS_AFTER
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "arcee": Family(options={"has_gate": False}, renames=PLAIN_MLP),
        "bloom": BLOOM,
        "cohere": Family(options=COHERE, is_interleaved=True),
        "cohere2": Family(options=COHERE, more=_all_but_windows, is_interleaved=True),
        "exaone4": Family(options={**AFTER, "qk_norm": True}, more=_exaone4, renames=NORMS_AFTER),
        "falcon": FALCON,
        "gpt_neo": GPT_NEO,
        "gpt_neox": Family(
            options={"mlp_bias": True, "has_gate": False},
            more=lambda config: {"has_mlp_norm": config.use_parallel_residual},
            own=("is_decoder",),  # which its model never reads
            has_fused_heads=True,
            renames=(
                (r"^gpt_neox\.", "model."),
                (r"^model\.embed_in\.", "model.embed_tokens."),
                (r"^model\.final_layer_norm\.", "model.norm."),
                (r"\.attention\.query_key_value\.", ".self_attn.qkv_proj."),
                (r"\.attention\.dense\.", ".self_attn.o_proj."),
                (r"\.dense_h_to_4h\.", ".fc1."),
                (r"\.dense_4h_to_h\.", ".fc2."),
                (r"^embed_out\.", "lm_head."),
            ),
            ignored=(r"\.attention\.(bias|masked_bias)$",),
        ),
        "helium": Family(
            options={"out_bias": False, "rounds_norms_late": True}, is_interleaved=True
        ),
        "hyperclovax": Family(
            # Granite divides by logits_scaling.
            more=lambda config: {
                "post_norms": config.use_post_norm,
                "logit_scale": config.logits_scaling,
            },
            own=("use_post_norm",),
            renames=(
                (r"\.post_norm1\.", ".post_self_attn_layernorm."),
                (r"\.post_norm2\.", ".post_mlp_layernorm."),
            ),
        ),
        "jais2": Family(options={"has_gate": False}, renames=PLAIN_MLP),
        "ministral": Family(),
        "mixtral": Family(
            more=_mixtral,
            own=("num_local_experts", "num_experts_per_tok"),
            renames=(
                (r"\.block_sparse_moe\.", ".mlp."),
                (r"\.w1\.", ".gate_proj."),
                (r"\.w2\.", ".down_proj."),
                (r"\.w3\.", ".up_proj."),
            ),
        ),
        "mpt": MPT,
        "nemotron": Family(
            options={
                "zero_centered_norms": True,
                "layer_norms": True,
                "has_norm_biases": True,
                "has_gate": False,
            },
            renames=PLAIN_MLP,
        ),
        "olmo": Family(options={"has_norm_weights": False, "has_norm_biases": False}),
        "olmo2": OLMO2,
        "olmo3": OLMO2,
        "phi": Family(
            options={
                "qkv_bias": True,
                "out_bias": True,
                "mlp_bias": True,
                "head_bias": True,
                "has_gate": False,
                "is_parallel": True,
            },
            renames=(
                (r"^model\.final_layernorm\.", "model.norm."),
                (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
            ),
        ),
        "seed_oss": Family(),
        "smollm3": Family(),
        "stablelm": Family(),
        "starcoder2": Family(
            options={"has_gate": False},
            renames=((r"\.c_fc\.", ".fc1."), (r"\.c_proj\.", ".fc2.")),
        ),
    }
)
