"""Describes a model for transformers, from the metadata of its GGUF file.

transformers reads such a config itself (`gguf_file=...`), but leaves many sizes at the defaults of
its classes, such as the channels of a head of Qwen3 or the soft caps of Gemma 2, and does not know
every family here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from .families import Family, family_of
from .gemma_config import gemma, gemma2, gemma3, gemma4
from .header import Header, Scalar
from .metadata import MAX_HEAD_DIM, MAX_LAYERS, Metadata, has_biases, head_dim, num_layers
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
    metadata = Metadata(header)
    return _shared(metadata, family) | OF_FAMILY[header.architecture](metadata)


def _shared(metadata: Metadata, family: Family) -> Values:
    hidden_size = metadata.whole("embedding_length")
    num_heads = metadata.whole("attention.head_count")
    values = {
        "model_type": family.model_type,
        "architectures": [family.model],
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers(metadata),
        "num_attention_heads": num_heads,
        "max_position_embeddings": metadata.whole("context_length"),
        "vocab_size": metadata.shape("token_embd.weight", 2)[0],
        "tie_word_embeddings": "output.weight" not in metadata.tensors,
        "dtype": _dtype(metadata),
        "bos_token_id": metadata.token("bos_token_id"),
        "pad_token_id": metadata.token("padding_token_id"),
        "eos_token_id": _ends(metadata),
    }
    if metadata.header.architecture not in BY_LAYER:
        values["rms_norm_eps"] = metadata.number("attention.layer_norm_rms_epsilon")
        values["num_key_value_heads"] = metadata.most("attention.head_count_kv", num_heads)
        values["head_dim"] = size = head_dim(metadata)
        values["rope_parameters"] = rope_parameters(metadata, size)
    if metadata.header.architecture not in NO_MLP:
        values["intermediate_size"] = metadata.whole("feed_forward_length")
    return values


def _ends(metadata: Metadata) -> list[int] | int | None:
    found = [metadata.token(key) for key in END_KEYS]
    ids = list(dict.fromkeys(token for token in found if token is not None))
    return ids if len(ids) > 1 else next(iter(ids), None)


def _dtype(metadata: Metadata) -> str:
    """Returns the dtype to compute in: that of the matrices, bfloat16 for quantised ones."""
    kinds = {t.type.name for t in metadata.tensors.values() if len(t.shape) > 1}
    plain = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if kinds - plain.keys() or "BF16" in kinds:
        return "bfloat16"
    return "float16" if "F16" in kinds else "float32"


def _llama(metadata: Metadata) -> Values:
    if metadata.whole("expert_count", 0, low=0):
        raise metadata.wrong("expert_count", "0: of this architecture, models without experts")
    return _biases(metadata)


def _biases(metadata: Metadata) -> Values:
    return {
        "attention_bias": has_biases(metadata, "attn_q"),
        "mlp_bias": has_biases(metadata, "ffn_up"),
    }


def _qwen2(metadata: Metadata) -> Values:
    del metadata
    return {"use_sliding_window": False}


def _qwen3(metadata: Metadata) -> Values:
    return {"attention_bias": has_biases(metadata, "attn_q"), "use_sliding_window": False}


def _experts(metadata: Metadata) -> Values:
    return {
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.shape("blk.0.ffn_down_exps.weight", 3)[2],
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }


def _qwen2moe(metadata: Metadata) -> Values:
    return _experts(metadata) | {
        "qkv_bias": has_biases(metadata, "attn_q"),
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": metadata.shape("blk.0.ffn_down_shexp.weight", 2)[1],
    }


def _sections(metadata: Metadata) -> dict[str, list[Scalar]]:
    """Returns the channel pairs of time, height and width, where the file states them."""
    found = [each for each in metadata.values("rope.dimension_sections") or () if each]
    return {"mrope_section": found} if found else {}


def _qwen2vl(metadata: Metadata) -> Values:
    shared = rope_parameters(metadata, head_dim(metadata))
    return _qwen2(metadata) | {"rope_parameters": shared | _sections(metadata)}


def _qwen3vl(metadata: Metadata) -> Values:
    shared = rope_parameters(metadata, head_dim(metadata), theta=5e6)
    return {
        "attention_bias": has_biases(metadata, "attn_q"),
        "rope_parameters": shared | _sections(metadata) | {"mrope_interleaved": True},
    }


def _qwen3vlmoe(metadata: Metadata) -> Values:
    return _experts(metadata) | _qwen3vl(metadata)


def _qwen3moe(metadata: Metadata) -> Values:
    biases = {"attention_bias": has_biases(metadata, "attn_q")}
    return _experts(metadata) | biases | {"norm_topk_prob": True}


def _qwen35(metadata: Metadata) -> Values:
    period = metadata.whole("full_attention_interval", 4)
    num_values = metadata.whole("ssm.time_step_rank")
    shared = rope_parameters(metadata, metadata.whole("attention.key_length", high=MAX_HEAD_DIM))
    return {
        "attention_bias": f"blk.{period - 1}.attn_q.bias" in metadata.tensors,
        "layer_types": [
            "linear_attention" if (i + 1) % period else "full_attention"
            for i in range(num_layers(metadata))
        ],
        "linear_conv_kernel_dim": metadata.whole("ssm.conv_kernel"),
        "linear_key_head_dim": metadata.whole("ssm.state_size"),
        "linear_num_key_heads": metadata.whole("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_value_head_dim": max(1, metadata.whole("ssm.inner_size") // num_values),
        "rope_parameters": shared | _sections(metadata) | {"mrope_interleaved": True},
    }


def _qwen35moe(metadata: Metadata) -> Values:
    experts = _experts(metadata)
    kept = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
    return _qwen35(metadata) | {
        **{name: experts[name] for name in kept},
        "shared_expert_intermediate_size": metadata.shape("blk.0.ffn_down_shexp.weight", 2)[1],
    }


def _qwen3next(metadata: Metadata) -> Values:
    values = _qwen35(metadata)
    for name in ("mrope_section", "mrope_interleaved"):
        values["rope_parameters"].pop(name, None)
    shared = metadata.shape("blk.0.ffn_down_shexp.weight", 2)[1]
    experts = _experts(metadata) | {"shared_expert_intermediate_size": shared}
    del experts["use_sliding_window"]
    return values | experts | {"norm_topk_prob": True}


def _granite(metadata: Metadata) -> Values:
    return _biases(metadata) | {
        "embedding_multiplier": metadata.number("embedding_scale", 1.0),
        "attention_multiplier": metadata.number("attention.scale", head_dim(metadata) ** -0.5),
        "residual_multiplier": metadata.number("residual_scale", 1.0),
        "logits_scaling": metadata.number("logit_scale", 1.0),
    }


def _granite_hybrid(metadata: Metadata) -> Values:
    count, inner = num_layers(metadata), metadata.whole("ssm.inner_size")
    kinds = metadata.values("attention.head_count_kv")
    if kinds is None or len(kinds) != count:
        raise metadata.wrong("attention.head_count_kv", f"a number for each of {count} layers")
    num_heads, size = metadata.whole("ssm.time_step_rank"), metadata.whole("embedding_length")
    mamba = next((i for i, each in enumerate(kinds) if not each), 0)
    num_experts = metadata.whole("expert_count", 0, low=0)
    is_rotated = metadata.header.values.get("granitehybrid.rope.scaling.finetuned") is True
    values = _granite(metadata) | {
        "layer_types": ["attention" if each else "mamba" for each in kinds],
        "mamba_n_heads": num_heads,
        "mamba_d_head": max(1, inner // num_heads),
        "mamba_n_groups": metadata.whole("ssm.group_count"),
        "mamba_d_state": metadata.whole("ssm.state_size"),
        "mamba_d_conv": metadata.whole("ssm.conv_kernel"),
        "mamba_expand": max(1, inner // size),
        "mamba_conv_bias": f"blk.{mamba}.ssm_conv1d.bias" in metadata.tensors,
        "mamba_proj_bias": f"blk.{mamba}.ssm_in.bias" in metadata.tensors,
        "num_local_experts": num_experts,
        "position_embedding_type": "rope" if is_rotated else None,
    }
    del values["mlp_bias"]
    if num_experts:
        values["num_experts_per_tok"] = metadata.whole("expert_used_count")
    shared = metadata.whole(
        "expert_shared_feed_forward_length", metadata.whole("feed_forward_length")
    )
    return values | {"shared_intermediate_size": shared}


def _phi3(metadata: Metadata) -> Values:
    positions = metadata.whole("context_length")
    original = metadata.whole("rope.scaling.original_context_length", positions)
    values: Values = {
        "sliding_window": metadata.whole("attention.sliding_window", 0, low=0) or None,
        "original_max_position_embeddings": original,
    }
    if "rope_factors_long.weight" in metadata.tensors:
        size = metadata.whole("embedding_length") // metadata.whole("attention.head_count")
        values["rope_parameters"] = rope_parameters(metadata, max(1, size)) | {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
            "long_factor": factors_of(metadata.header, "rope_factors_long.weight"),
            "short_factor": factors_of(metadata.header, "rope_factors_short.weight"),
        }
    return values


def _lfm2(metadata: Metadata) -> Values:
    heads = metadata.values("attention.head_count_kv")
    count = num_layers(metadata)
    is_good = heads is not None and len(heads) == count
    if heads is None or not is_good or not all(type(each) is int and each >= 0 for each in heads):
        raise metadata.wrong("attention.head_count_kv", f"a number for each of {count} layers")
    kinds = ["full_attention" if each else "conv" for each in heads]
    first = kinds.index("conv") if "conv" in kinds else 0
    return {
        "block_auto_adjust_ff_dim": False,  # the stated size is the final one
        "num_key_value_heads": max(heads) or metadata.whole("attention.head_count"),
        "layer_types": kinds,
        "norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": metadata.whole("shortconv.l_cache"),
        "conv_bias": f"blk.{first}.shortconv.in_proj.bias" in metadata.tensors,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": metadata.number("rope.freq_base", 1e6),
        },
    }


def _lfm2moe(metadata: Metadata) -> Values:
    values = _lfm2(metadata)
    del values["block_auto_adjust_ff_dim"]
    first = metadata.whole("leading_dense_block_count", 0, low=0, high=MAX_LAYERS)
    return values | {
        "num_dense_layers": first,
        "num_experts": metadata.whole("expert_count"),
        "num_experts_per_tok": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.whole("expert_feed_forward_length"),
        "routed_scaling_factor": metadata.number("expert_weights_scale", 1.0),
        "norm_topk_prob": True,
        "use_expert_bias": f"blk.{first}.exp_probs_b.bias" in metadata.tensors,
    }


def _ernie(metadata: Metadata) -> Values:
    return {"use_bias": has_biases(metadata, "attn_q")}


def _ernie_moe(metadata: Metadata) -> Values:
    first = metadata.whole("leading_dense_block_count", 0, low=0, high=MAX_LAYERS)
    period = metadata.whole("interleave_moe_layer_step", 1, high=MAX_LAYERS)
    sparse = next(i for i in range(first, first + period) if (i + 1) % period == 0)
    return _ernie(metadata) | {
        "moe_num_experts": metadata.whole("expert_count"),
        "moe_k": metadata.whole("expert_used_count"),
        "moe_intermediate_size": metadata.shape(f"blk.{sparse}.ffn_down_exps.weight", 3)[2],
        "moe_num_shared_experts": metadata.whole("expert_shared_count", 0, low=0),
        "moe_layer_start_index": first,
        "moe_layer_interval": period,
    }


def _glm4(metadata: Metadata) -> Values:
    shared = rope_parameters(metadata, head_dim(metadata))
    return {
        "attention_bias": has_biases(metadata, "attn_q"),
        "rope_parameters": shared | _sections(metadata),
    }


OF_FAMILY: Mapping[str, Callable[[Metadata], Values]] = MappingProxyType(
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
