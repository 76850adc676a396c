"""The architectures that are read: how GGUF names their tensors, and what its converter changed.

The names and changes are those of llama.cpp's conversion/*.py; a test compares the names with the
tables of the package `gguf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from mmdeploy_llm.errors import ModelNotSupportedError

TOWER = "clip"  # general.architecture of a file with a vision tower
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
EXPERTS = {  # {}: number of the expert
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
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
    flat: tensors whose values have one axis only in transformers.
    experts: names of stacked experts within a layer.
    has_extra_layers: whether layers that predict further tokens may follow.
    halved: tensors whose rotated rows the converter reordered the other way, from pairs to halves,
        in models with sections of rotary channels -> metadata key of their heads.
    needs_tower: whether transformers has the model with a vision tower only.
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
    flat: tuple[str, ...] = ()
    experts: Mapping[str, str] = field(default_factory=dict)
    has_extra_layers: bool = False
    halved: Mapping[str, str] = field(default_factory=dict)
    needs_tower: bool = False


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
GEMMA3_LAYER = {**ATTENTION, **MLP, **NORMS_AFTER, **HEAD_NORMS}
GEMMA4 = Family(
    model_type="gemma4_text",
    model="Gemma4ForCausalLM",
    layer={
        **GEMMA3_LAYER,
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
        "ffn_gate_inp": "router.proj",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    outer={
        "token_embd": "model.embed_tokens",
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
        "output_norm": "model.norm",
        "output": "lm_head",
    },
    whole={
        "layer_output_scale.weight": "layer_scalar",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        "ffn_down_exps.weight": "experts.down_proj",
    },
)
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
QWEN3_NEXT = replace(
    QWEN35,
    model_type="qwen3_next",
    model="Qwen3NextForCausalLM",
    layer={
        **{name: own for name, own in HYBRID.items() if name not in ("ssm_alpha", "ssm_beta")},
        "ssm_ba": "linear_attn.in_proj_ba",
        "ffn_gate_inp": "mlp.gate",
        **SHARED_EXPERT,
    },
    tiled={},
    tiled_columns="",
    new_axes={**QWEN35.new_axes, "ffn_gate_inp_shexp": 0},
    experts=EXPERTS,
)
LFM2 = Family(
    model_type="lfm2",
    model="Lfm2ForCausalLM",
    layer=LFM2_LAYER,
    outer=LFM2_OUTER,
    new_axes={"shortconv.conv": 1},
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
            experts=EXPERTS,
        ),
        "qwen3": Family(
            model_type="qwen3", model="Qwen3ForCausalLM", layer={**DENSE, **HEAD_NORMS}
        ),
        "qwen3moe": Family(
            model_type="qwen3_moe",
            model="Qwen3MoeForCausalLM",
            layer={**SPARSE, **HEAD_NORMS},
            experts=EXPERTS,
        ),
        "qwen2vl": Family(
            model_type="qwen2_vl_text",
            model="Qwen2VLForConditionalGeneration",
            needs_tower=True,
        ),
        "qwen3vl": Family(
            model_type="qwen3_vl_text",
            model="Qwen3VLForConditionalGeneration",
            layer={**DENSE, **HEAD_NORMS},
            needs_tower=True,
        ),
        "qwen3vlmoe": Family(
            model_type="qwen3_vl_moe_text",
            model="Qwen3VLMoeForConditionalGeneration",
            layer={**SPARSE, **HEAD_NORMS},
            experts=EXPERTS,
            needs_tower=True,
        ),
        "qwen35": QWEN35,
        "qwen35moe": replace(
            QWEN35,
            model_type="qwen3_5_moe_text",
            model="Qwen3_5MoeForCausalLM",
            layer={**HYBRID, "ffn_gate_inp": "mlp.gate", **SHARED_EXPERT},
            new_axes={**QWEN35.new_axes, "ffn_gate_inp_shexp": 0},
            experts=EXPERTS,
        ),
        "qwen3next": QWEN3_NEXT,
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
            layer=GEMMA3_LAYER,
            adds_one=True,
        ),
        "gemma4": GEMMA4,
        "granite": Family(model_type="granite", model="GraniteForCausalLM", permuted=PERMUTED),
        "granitehybrid": Family(
            model_type="granitemoehybrid",
            model="GraniteMoeHybridForCausalLM",
            layer={
                **DENSE,
                "ssm_in": "mamba.in_proj",
                "ssm_conv1d": "mamba.conv1d",
                "ssm_norm": "mamba.norm",
                "ssm_out": "mamba.out_proj",
                "ffn_gate_inp": "block_sparse_moe.router.layer",
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
            },
            whole={"ssm_a": "mamba.A_log", "ssm_d": "mamba.D", "ssm_dt.bias": "mamba.dt_bias"},
            permuted=PERMUTED,
            logs=("ssm_a",),
            flat=("ssm_a", "ssm_d", "ssm_norm"),
            new_axes={"ssm_conv1d": 1},
            experts=EXPERTS,
        ),
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
        "lfm2": LFM2,
        "lfm2moe": replace(
            LFM2,
            model_type="lfm2_moe",
            model="Lfm2MoeForCausalLM",
            layer={**LFM2_LAYER, "ffn_gate_inp": "feed_forward.gate"},
            whole={"exp_probs_b.bias": "feed_forward.expert_bias"},
            experts={
                "ffn_gate_exps": "feed_forward.experts.{}.w1",
                "ffn_up_exps": "feed_forward.experts.{}.w3",
                "ffn_down_exps": "feed_forward.experts.{}.w2",
            },
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
            experts=EXPERTS,
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
            halved=PERMUTED,
        ),
    }
)


def family_of(architecture: str) -> Family:
    """Returns the family of general.architecture. Raises ModelNotSupportedError for one that is not
    known."""
    if architecture == TOWER:
        raise ModelNotSupportedError(
            "a GGUF file with a vision tower holds no text model; name the file of the text model "
            "that lies beside it"
        )
    if architecture not in FAMILIES:
        raise ModelNotSupportedError(
            f"a GGUF file of the architecture {architecture[:60]!r} cannot be read; known: "
            f"{', '.join(FAMILIES)}. Use the model's safetensors files"
        )
    return FAMILIES[architecture]
