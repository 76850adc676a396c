"""The architectures that are read: how GGUF names their tensors, and what its converter changed.

The names and changes are those of llama.cpp's conversion/*.py; a test compares the names with the
tables of the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mmdeploy_llm.errors import ModelNotSupportedError

# Names within "blk.N." -> names within "model.layers.N.", both without ".weight" and ".bias".
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP = {
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
DENSE = {**ATTENTION, **MLP, "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SPARSE = {**ATTENTION, "ffn_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.gate"}
SHARED_EXPERT = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
NORMS_AFTER = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED_MLP = {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"}
EXPERTS = {
    "ffn_gate_exps": "gate_proj",
    "ffn_up_exps": "up_proj",
    "ffn_down_exps": "down_proj",
}
PERMUTED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
# Factors of rotary frequencies, which the config describes.
NOT_WEIGHTS = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture of GGUF.

    model_type, model: names of config and class in transformers.
    layer: names within a layer. outer: names outside the layers.
    permuted: tensors whose rows the converter reordered in each head, from the halves that
        transformers rotates to the pairs that llama.cpp rotates -> metadata key of their heads.
    whole: names within a layer that have no ".weight" or ".bias" in both.
    adds_one: whether 1 was added to the weights of norms, but for `plain_norms`.
    tiled: tensors whose value heads were reordered -> which rows they are: "values" (all), "heads"
        (one row for each head), "after keys" (those after queries and keys).
    tiled_columns: the tensor whose columns were.
    logs: tensors that hold -exp(value).
    new_axes: tensors from which an axis of size 1 was removed -> the axis.
    has_experts: whether experts may be stacked.
    has_extra_layers: whether layers that predict further tokens may follow.
    """

    model_type: str
    model: str
    layer: Mapping[str, str] = field(default_factory=lambda: DENSE)
    outer: Mapping[str, str] = field(
        default_factory=lambda: {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
        }
    )
    permuted: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=dict)
    adds_one: bool = False
    plain_norms: tuple[str, ...] = ()
    tiled: Mapping[str, str] = field(default_factory=dict)
    tiled_columns: str = ""
    logs: tuple[str, ...] = ()
    new_axes: Mapping[str, int] = field(default_factory=dict)
    has_experts: bool = False
    has_extra_layers: bool = False


GATED_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
GATED_DELTA_WHOLE = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
TILED = {
    "attn_qkv": "after keys",
    "attn_gate": "values",
    "ssm_alpha": "heads",
    "ssm_beta": "heads",
    "ssm_conv1d": "after keys",
    "ssm_a": "heads",
    "ssm_dt.bias": "heads",
}
HYBRID = {**ATTENTION, **HEAD_NORMS, **GATED_DELTA}
HYBRID["post_attention_norm"] = "post_attention_layernorm"
LFM2_LAYER = {
    **ATTENTION,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
LFM2_OUTER = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",  # in files of other converters
    "output": "lm_head",
}
QWEN35 = Family(
    model_type="qwen3_5_text",
    model="Qwen3_5ForCausalLM",
    layer={**HYBRID, **MLP},
    whole=GATED_DELTA_WHOLE,
    adds_one=True,
    plain_norms=("ssm_norm",),
    tiled=TILED,
    tiled_columns="ssm_out",
    logs=("ssm_a",),
    new_axes={"ssm_conv1d": 1},
    has_extra_layers=True,
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(model_type="llama", model="LlamaForCausalLM", permuted=PERMUTED),
        "qwen2": Family(model_type="qwen2", model="Qwen2ForCausalLM"),
        "qwen2moe": Family(
            model_type="qwen2_moe",
            model="Qwen2MoeForCausalLM",
            layer={**SPARSE, **SHARED_EXPERT},
            new_axes={"ffn_gate_inp_shexp": 0},
            has_experts=True,
        ),
        "qwen3": Family(
            model_type="qwen3", model="Qwen3ForCausalLM", layer={**DENSE, **HEAD_NORMS}
        ),
        "qwen3moe": Family(
            model_type="qwen3_moe",
            model="Qwen3MoeForCausalLM",
            layer={**SPARSE, **HEAD_NORMS},
            has_experts=True,
        ),
        "qwen35": QWEN35,
        "qwen35moe": replace(
            QWEN35,
            model_type="qwen3_5_moe_text",
            model="Qwen3_5MoeForCausalLM",
            layer={**HYBRID, "ffn_gate_inp": "mlp.gate", **SHARED_EXPERT},
            new_axes={**QWEN35.new_axes, "ffn_gate_inp_shexp": 0},
            has_experts=True,
        ),
        "gemma": Family(model_type="gemma", model="GemmaForCausalLM", adds_one=True),
        "gemma2": Family(
            model_type="gemma2",
            model="Gemma2ForCausalLM",
            layer={**ATTENTION, **MLP, **NORMS_AFTER},
            adds_one=True,
        ),
        "gemma3": Family(
            model_type="gemma3_text",
            model="Gemma3ForCausalLM",
            layer={**ATTENTION, **MLP, **NORMS_AFTER, **HEAD_NORMS},
            adds_one=True,
        ),
        "granite": Family(model_type="granite", model="GraniteForCausalLM", permuted=PERMUTED),
        "phi3": Family(
            model_type="phi3",
            model="Phi3ForCausalLM",
            layer={
                "attn_norm": "input_layernorm",
                "attn_qkv": "self_attn.qkv_proj",
                "attn_output": "self_attn.o_proj",
                "ffn_norm": "post_attention_layernorm",
                **FUSED_MLP,
            },
        ),
        "lfm2": Family(
            model_type="lfm2",
            model="Lfm2ForCausalLM",
            layer=LFM2_LAYER,
            outer=LFM2_OUTER,
            new_axes={"shortconv.conv": 1},
        ),
        "ernie4_5": Family(model_type="ernie4_5", model="Ernie4_5ForCausalLM"),
        "ernie4_5-moe": Family(
            model_type="ernie4_5_moe",
            model="Ernie4_5_MoeForCausalLM",
            layer={
                **DENSE,
                "ffn_gate_inp": "mlp.gate",
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
            },
            whole={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
            new_axes={"exp_probs_b.bias": 0},
            has_experts=True,
        ),
        "glm4": Family(
            model_type="glm4",
            model="Glm4ForCausalLM",
            layer={
                **ATTENTION,
                **FUSED_MLP,
                "post_attention_norm": "post_self_attn_layernorm",
                "ffn_norm": "post_attention_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            },
        ),
    }
)


def family_of(architecture: str) -> Family:
    """Returns the family of general.architecture. Raises ModelNotSupportedError for one that is not
    known."""
    if architecture not in FAMILIES:
        raise ModelNotSupportedError(
            f"a GGUF file of the architecture {architecture[:60]!r} cannot be read; known: "
            f"{', '.join(FAMILIES)}. Use the model's safetensors files"
        )
    return FAMILIES[architecture]
