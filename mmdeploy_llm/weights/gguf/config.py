"""Describes a model for transformers, from the metadata of its GGUF file.

transformers reads such a config itself (`gguf_file=...`), but leaves many sizes at the defaults of
its classes, such as the channels of a head of Qwen3 or the soft caps of Gemma 2, and does not know
every family here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from .facts import MAX_LAYERS, Facts, num_layers
from .families import Family, family_of
from .header import Header, Scalar
from .rope import MAX_HEAD_DIM, factors_of, rope_parameters

END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of a text, a turn, a message
NO_MLP = "qwen35moe"  # has experts in every layer, and its files state no size of an MLP
GEMMA_PERIOD = 6  # every so many layers of Gemma 3, one attends to everything
# llama.cpp knows these models, whose scores are scaled by other channels, by their layers.
WIDE_HEADS = MappingProxyType({"gemma2": 46, "gemma3": 62})

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
    if facts.header.architecture != "lfm2":
        values["rms_norm_eps"] = facts.number("attention.layer_norm_rms_epsilon")
        values["num_key_value_heads"] = facts.whole("attention.head_count_kv", num_heads)
        values["head_dim"] = head_dim = _head_dim(facts)
        values["rope_parameters"] = rope_parameters(facts, head_dim)
    if facts.header.architecture != NO_MLP:
        values["intermediate_size"] = facts.whole("feed_forward_length")
    return values


def _head_dim(facts: Facts) -> int:
    """Returns the channels of a head: as stated, else as the rows of the first query matrix."""
    num_heads = facts.whole("attention.head_count")
    if facts.has("attention.key_length"):
        found = facts.whole("attention.key_length", high=MAX_HEAD_DIM)
        if facts.whole("attention.value_length", found) != found:
            raise facts.wrong("attention.value_length", f"the same as key_length, {found}")
        return found
    if "blk.0.attn_q.weight" in facts.tensors:
        return max(1, facts.shape("blk.0.attn_q.weight", 2)[0] // num_heads)
    return max(1, facts.whole("embedding_length") // num_heads)


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


def _has_biases(facts: Facts, name: str) -> bool:
    return f"blk.0.{name}.bias" in facts.tensors


def _llama(facts: Facts) -> Values:
    if facts.whole("expert_count", 0, low=0):
        raise facts.wrong("expert_count", "0: of this architecture, models without experts")
    return {
        "attention_bias": _has_biases(facts, "attn_q"),
        "mlp_bias": _has_biases(facts, "ffn_up"),
    }


def _qwen2(facts: Facts) -> Values:
    del facts
    return {"use_sliding_window": False}


def _qwen3(facts: Facts) -> Values:
    return {"attention_bias": _has_biases(facts, "attn_q"), "use_sliding_window": False}


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
        "qkv_bias": _has_biases(facts, "attn_q"),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": facts.shape("blk.0.ffn_down_shexp.weight", 2)[1],
    }


def _qwen3moe(facts: Facts) -> Values:
    biases = {"attention_bias": _has_biases(facts, "attn_q")}
    return _experts(facts) | biases | {"norm_topk_prob": True}


def _qwen35(facts: Facts) -> Values:
    period = facts.whole("full_attention_interval", 4)
    num_values = facts.whole("ssm.time_step_rank")
    shared = rope_parameters(facts, facts.whole("attention.key_length", high=MAX_HEAD_DIM))
    sections = facts.values("rope.dimension_sections") or ()
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
        "rope_parameters": shared
        | {"mrope_section": [each for each in sections if each], "mrope_interleaved": True},
    }


def _qwen35moe(facts: Facts) -> Values:
    experts = _experts(facts)
    kept = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return _qwen35(facts) | {
        **{name: experts[name] for name in kept},
        "shared_expert_intermediate_size": facts.shape("blk.0.ffn_down_shexp.weight", 2)[1],
    }


def _gemma(facts: Facts) -> Values:
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": _has_biases(facts, "attn_q"),
    }


def _score_scalar(facts: Facts) -> int:
    """Returns query_pre_attn_scalar, which no metadata hold, by llama.cpp's rule."""
    if num_layers(facts) == WIDE_HEADS[facts.header.architecture]:
        return max(1, facts.whole("embedding_length") // facts.whole("attention.head_count"))
    return _head_dim(facts)


def _layer_types(facts: Facts, period: int) -> list[str]:
    """Returns the kind of each layer: as stated for each, else all but every so many slide."""
    count = num_layers(facts)
    slides: Sequence[Scalar] | None = facts.values("attention.sliding_window_pattern")
    if slides is None:
        period = facts.whole("attention.sliding_window_pattern", period)
        slides = [(i + 1) % period != 0 for i in range(count)]
    if len(slides) != count:
        raise facts.wrong("attention.sliding_window_pattern", f"{count} values")
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _gemma2(facts: Facts) -> Values:
    return _gemma(facts) | {
        "attn_logit_softcapping": facts.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": facts.number("final_logit_softcapping", 30.0),
        "sliding_window": facts.whole("attention.sliding_window", 4096),
        "query_pre_attn_scalar": _score_scalar(facts),
        "layer_types": _layer_types(facts, 2),
    }


def _gemma3(facts: Facts) -> Values:
    values = _gemma(facts) | {"query_pre_attn_scalar": _score_scalar(facts)}
    local = {"rope_type": "default", "rope_theta": facts.number("rope.freq_base_swa", 10_000.0)}
    values["rope_parameters"] = {
        "full_attention": rope_parameters(facts, _head_dim(facts), theta=1e6),
        "sliding_attention": local,
    }
    if facts.has("final_logit_softcapping"):
        values["final_logit_softcapping"] = facts.number("final_logit_softcapping")
    if facts.has("attention.sliding_window"):
        values["sliding_window"] = facts.whole("attention.sliding_window")
        values["layer_types"] = _layer_types(facts, GEMMA_PERIOD)
    else:
        values["layer_types"] = ["full_attention"] * num_layers(facts)
    return values


def _granite(facts: Facts) -> Values:
    return _llama(facts) | {
        "embedding_multiplier": facts.number("embedding_scale", 1.0),
        "attention_multiplier": facts.number("attention.scale", _head_dim(facts) ** -0.5),
        "residual_multiplier": facts.number("residual_scale", 1.0),
        "logits_scaling": facts.number("logit_scale", 1.0),
    }


def _phi3(facts: Facts) -> Values:
    positions = facts.whole("context_length")
    original = facts.whole("rope.scaling.original_context_length", positions)
    values: Values = {
        "sliding_window": facts.whole("attention.sliding_window", 0, low=0) or None,
        "original_max_position_embeddings": original,
    }
    if "rope_factors_long.weight" in facts.tensors:
        head_dim = facts.whole("embedding_length") // facts.whole("attention.head_count")
        values["rope_parameters"] = rope_parameters(facts, max(1, head_dim)) | {
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


def _ernie(facts: Facts) -> Values:
    return {"use_bias": _has_biases(facts, "attn_q")}


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
    return {"attention_bias": _has_biases(facts, "attn_q")}


OF_FAMILY: Mapping[str, Callable[[Facts], Values]] = MappingProxyType(
    {
        "llama": _llama,
        "qwen2": _qwen2,
        "qwen2moe": _qwen2moe,
        "qwen3": _qwen3,
        "qwen3moe": _qwen3moe,
        "qwen35": _qwen35,
        "qwen35moe": _qwen35moe,
        "gemma": _gemma,
        "gemma2": _gemma2,
        "gemma3": _gemma3,
        "granite": _granite,
        "phi3": _phi3,
        "lfm2": _lfm2,
        "ernie4_5": _ernie,
        "ernie4_5-moe": _ernie_moe,
        "glm4": _glm4,
    }
)
