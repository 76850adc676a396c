"""Describes a model for transformers, from the metadata of its GGUF file.

transformers reads such a config itself (`gguf_file=...`), but leaves many sizes at the defaults of
its classes, such as the channels of a head of Qwen3 or the soft caps of Gemma 2, and does not know
every family here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from .facts import MAX_HEAD_DIM, MAX_LAYERS, Facts, has_biases, head_dim, num_layers
from .families import Family, family_of
from .gemma_config import gemma, gemma2, gemma3, gemma4
from .header import Header, Scalar
from .rope import factors_of, rope_parameters

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message
BY_LAYER = (
    "lfm2",
    "lfm2moe",
    "gemma4",
)  # state heads for each layer, or have several kinds of them
# The first has experts in every layer, and its files state no size of an MLP; the second has
# several sizes.
NO_MLP = ("qwen35moe", "gemma4")

Values = dict[str, Any]


def gguf_config(header: Header) -> Values:
    """Returns the fields of transformers' config, "model_type" and "architectures" included.

    Raises ModelNotSupportedError for an unknown architecture, CheckpointError for metadata that are
    missing or out of range.
    """
    family = family_of(header.architecture)
    facts = Facts(header)
    return _shared(facts, family) | OF_FAMILY[header.architecture](facts)


def _shared(facts: Facts, family: Family) -> Values:
    hidden_size = facts.whole("embedding_length")
    num_heads = facts.whole("attention.head_count")
    values = {
        "model_type": family.model_type,
        "architectures": [family.model],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(facts),
        "num_attention_heads": num_heads,
        "max_position_embeddings": facts.whole("context_length"),
        "vocab_size": facts.shape("token_embd.weight", 2)[0],
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "dtype": _dtype(facts),
        "bos_token_id": facts.token("bos_token_id"),
        "pad_token_id": facts.token("padding_token_id"),
        "eos_token_id": _ends(facts),
    }
    if facts.header.architecture not in BY_LAYER:
        values["rms_norm_eps"] = facts.number("attention.layer_norm_rms_epsilon")
        values["num_key_value_heads"] = facts.most("attention.head_count_kv", num_heads)
        values["head_dim"] = size = head_dim(facts)
        values["rope_parameters"] = rope_parameters(facts, size)
    if facts.header.architecture not in NO_MLP:
        values["intermediate_size"] = facts.whole("feed_forward_length")
    return values


def _ends(facts: Facts) -> list[int] | int | None:
    found = [facts.token(key) for key in END_KEYS]
    ids = list(dict.fromkeys(token for token in found if token is not None))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _dtype(facts: Facts) -> str:
    """Returns the dtype to compute in: that of the matrices, bfloat16 for quantised ones."""
    kinds = {t.type.name for t in facts.tensors.values() if len(t.shape) > 1}
    plain = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if kinds - plain.keys() or "BF16" in kinds:
        return "bfloat16"
    return "float16" if "F16" in kinds else "float32"


def _llama(facts: Facts) -> Values:
    if facts.whole("expert_count", 0, low=0):
        raise facts.wrong("expert_count", "0: of this architecture, models without experts")
    return _biases(facts)


def _biases(facts: Facts) -> Values:
    return {
        "attention_bias": has_biases(facts, "attn_q"),
        "mlp_bias": has_biases(facts, "ffn_up"),
    }


def _qwen2(facts: Facts) -> Values:
    del facts
    return {"use_sliding_window": False}


def _qwen3(facts: Facts) -> Values:
    return {"attention_bias": has_biases(facts, "attn_q"), "use_sliding_window": False}


def _experts(facts: Facts) -> Values:
    return {
        "num_experts": facts.whole("expert_count"),
        "num_experts_per_tok": facts.whole("expert_used_count"),
        "moe_intermediate_size": facts.shape("blk.0.ffn_down_exps.weight", 3)[2],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def _qwen2moe(facts: Facts) -> Values:
    return _experts(facts) | {
        "qkv_bias": has_biases(facts, "attn_q"),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": facts.shape("blk.0.ffn_down_shexp.weight", 2)[1],
    }


def _sections(facts: Facts) -> dict[str, list[Scalar]]:
    """Returns the channel pairs of time, height and width, where the file states them."""
    found = [each for each in facts.values("rope.dimension_sections") or () if each]
    return {"mrope_section": found} if found else {}


def _qwen2vl(facts: Facts) -> Values:
    shared = rope_parameters(facts, head_dim(facts))
    return _qwen2(facts) | {"rope_parameters": shared | _sections(facts)}


def _qwen3vl(facts: Facts) -> Values:
    shared = rope_parameters(facts, head_dim(facts), theta=5e6)
    return {
        "attention_bias": has_biases(facts, "attn_q"),
        "rope_parameters": shared | _sections(facts) | {"mrope_interleaved": True},
    }


def _qwen3vlmoe(facts: Facts) -> Values:
    return _experts(facts) | _qwen3vl(facts)


def _qwen3moe(facts: Facts) -> Values:
    biases = {"attention_bias": has_biases(facts, "attn_q")}
    return _experts(facts) | biases | {"norm_topk_prob": True}


def _qwen35(facts: Facts) -> Values:
    period = facts.whole("full_attention_interval", 4)
    num_values = facts.whole("ssm.time_step_rank")
    shared = rope_parameters(facts, facts.whole("attention.key_length", high=MAX_HEAD_DIM))
    return {
        "attention_bias": f"blk.{period - 1}.attn_q.bias" in facts.tensors,
        "layer_types": [
            "linear_attention" if (i + 1) % period else "full_attention"
            for i in range(num_layers(facts))
        ],
        "linear_conv_kernel_dim": facts.whole("ssm.conv_kernel"),
        "linear_key_head_dim": facts.whole("ssm.state_size"),
        "linear_num_key_heads": facts.whole("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_value_head_dim": max(1, facts.whole("ssm.inner_size") // num_values),
        "rope_parameters": shared | _sections(facts) | {"mrope_interleaved": True},
    }


def _qwen35moe(facts: Facts) -> Values:
    experts = _experts(facts)
    kept = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return _qwen35(facts) | {
        **{name: experts[name] for name in kept},
        "shared_expert_intermediate_size": facts.shape("blk.0.ffn_down_shexp.weight", 2)[1],
    }


def _qwen3next(facts: Facts) -> Values:
    values = _qwen35(facts)
    for name in ("mrope_section", "mrope_interleaved"):
        values["rope_parameters"].pop(name, None)
    shared = facts.shape("blk.0.ffn_down_shexp.weight", 2)[1]
    experts = _experts(facts) | {"shared_expert_intermediate_size": shared}
    del experts["use_sliding_window"]
    return values | experts | {"norm_topk_prob": True}


def _granite(facts: Facts) -> Values:
    return _biases(facts) | {
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "attention_multiplier": facts.number("attention.scale", head_dim(facts) ** -0.5),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


def _granite_hybrid(facts: Facts) -> Values:
    count, inner = num_layers(facts), facts.whole("ssm.inner_size")
    kinds = facts.values("attention.head_count_kv")
    if kinds is None or len(kinds) != count:
        raise facts.wrong("attention.head_count_kv", f"a number for each of {count} layers")
    num_heads, size = facts.whole("ssm.time_step_rank"), facts.whole("embedding_length")
    mamba = next((i for i, each in enumerate(kinds) if not each), 0)
    num_experts = facts.whole("expert_count", 0, low=0)
    is_rotated = facts.header.values.get("granitehybrid.rope.scaling.finetuned") is True
    values = _granite(facts) | {
        "layer_types": ["attention" if each else "mamba" for each in kinds],
        "mamba_n_heads": num_heads,
        "mamba_d_head": max(1, inner // num_heads),
        "mamba_n_groups": facts.whole("ssm.group_count"),
        "mamba_d_state": facts.whole("ssm.state_size"),
        "mamba_d_conv": facts.whole("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // size),
        "mamba_conv_bias": f"blk.{mamba}.ssm_conv1d.bias" in facts.tensors,
        "mamba_proj_bias": f"blk.{mamba}.ssm_in.bias" in facts.tensors,
        "num_local_experts": num_experts,
        "position_embedding_type": "rope" if is_rotated else None,
    }
    del values["mlp_bias"]
    if num_experts:
        values["num_experts_per_tok"] = facts.whole("expert_used_count")
    shared = facts.whole("expert_shared_feed_forward_length", facts.whole("feed_forward_length"))
    return values | {"shared_intermediate_size": shared}


def _phi3(facts: Facts) -> Values:
    positions = facts.whole("context_length")
    original = facts.whole("rope.scaling.original_context_length", positions)
    values: Values = {
        "sliding_window": facts.whole("attention.sliding_window", 0, low=0) or None,
        "original_max_position_embeddings": original,
    }
    if "rope_factors_long.weight" in facts.tensors:
        size = facts.whole("embedding_length") // facts.whole("attention.head_count")
        values["rope_parameters"] = rope_parameters(facts, max(1, size)) | {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "long_factor": factors_of(facts.header, "rope_factors_long.weight"),
            "short_factor": factors_of(facts.header, "rope_factors_short.weight"),
        }
    return values


def _lfm2(facts: Facts) -> Values:
    heads = facts.values("attention.head_count_kv")
    count = num_layers(facts)
    is_good = heads is not None and len(heads) == count
    if heads is None or not is_good or not all(type(each) is int and each >= 0 for each in heads):
        raise facts.wrong("attention.head_count_kv", f"a number for each of {count} layers")
    kinds = ["full_attention" if each else "conv" for each in heads]
    first = kinds.index("conv") if "conv" in kinds else 0
    return {
        "block_auto_adjust_ff_dim": False,  # the stated size is the final one
        "num_key_value_heads": max(heads) or facts.whole("attention.head_count"),
        "layer_types": kinds,
        "norm_eps": facts.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": facts.whole("shortconv.l_cache"),
        "conv_bias": f"blk.{first}.shortconv.in_proj.bias" in facts.tensors,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": facts.number("rope.freq_base", 1e6),
        },
    }


def _lfm2moe(facts: Facts) -> Values:
    values = _lfm2(facts)
    del values["block_auto_adjust_ff_dim"]
    first = facts.whole("leading_dense_block_count", 0, low=0, high=MAX_LAYERS)
    return values | {
        "num_dense_layers": first,
        "num_experts": facts.whole("expert_count"),
        "num_experts_per_tok": facts.whole("expert_used_count"),
        "moe_intermediate_size": facts.whole("expert_feed_forward_length"),
        "routed_scaling_factor": facts.number("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
        "use_expert_bias": f"blk.{first}.exp_probs_b.bias" in facts.tensors,
    }


def _ernie(facts: Facts) -> Values:
    return {"use_bias": has_biases(facts, "attn_q")}


def _ernie_moe(facts: Facts) -> Values:
    first = facts.whole("leading_dense_block_count", 0, low=0, high=MAX_LAYERS)
    period = facts.whole("interleave_moe_layer_step", 1, high=MAX_LAYERS)
    sparse = next(i for i in range(first, first + period) if (i + 1) % period == 0)
    return _ernie(facts) | {
        "moe_num_experts": facts.whole("expert_count"),
        "moe_k": facts.whole("expert_used_count"),
        "moe_intermediate_size": facts.shape(f"blk.{sparse}.ffn_down_exps.weight", 3)[2],
        "moe_num_shared_experts": facts.whole("expert_shared_count", 0, low=0),
        "moe_layer_start_index": first,
        "moe_layer_interval": period,
    }


def _glm4(facts: Facts) -> Values:
    shared = rope_parameters(facts, head_dim(facts))
    return {
        "attention_bias": has_biases(facts, "attn_q"),
        "rope_parameters": shared | _sections(facts),
    }


OF_FAMILY: Mapping[str, Callable[[Facts], Values]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen2,
        "qwen2moe": _qwen2moe,
        "qwen3": _qwen3,
        "qwen3moe": _qwen3moe,
        "qwen2vl": _qwen2vl,
        "qwen3vl": _qwen3vl,
        "qwen3vlmoe": _qwen3vlmoe,
        "qwen3next": _qwen3next,
        "qwen35": _qwen35,
        "qwen35moe": _qwen35moe,
        "gemma": gemma,
        "gemma2": gemma2,
        "gemma3": gemma3,
        "gemma4": gemma4,
        "granite": _granite,
        "granitehybrid": _granite_hybrid,
        "phi3": _phi3,
        "lfm2": _lfm2,
        "lfm2moe": _lfm2moe,
        "ernie4_5": _ernie,
        "ernie4_5-moe": _ernie_moe,
        "glm4": _glm4,
    }
)
