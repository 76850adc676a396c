"""Rows of families before rotary embeddings: biases of positions, or learned ones."""

from __future__ import annotations

import math
from typing import Any

import torch

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import AlibiConfig, RotaryConfig, rotary_config

from .family import Family, Options

BIASES: Options = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}


def _unrotated(config: Any) -> RotaryConfig:
    """Returns what says the size of heads; no layer rotates them."""
    return RotaryConfig(head_dim=config.hidden_size // config.num_attention_heads)


def _without_rotation(config: Any) -> Options:
    return {"nope_layers": frozenset(range(config.num_hidden_layers))}


def _four_times(config: Any) -> int:
    return int(4 * config.hidden_size)


def _slopes(num_heads: int, dtype: torch.dtype = torch.float32) -> tuple[float, ...]:
    """Returns a geometric series; where the heads are no power of two, those beyond the largest one
    have every second slope of the series for twice as many. Computed in float32, as transformers
    does."""
    size = 2 ** int(math.log2(num_heads))

    def series(count: int, powers: range) -> torch.Tensor:
        base = 2.0 ** -(2.0 ** -(math.log2(count) - 3))  # models are built on the meta device
        return torch.full((), base, device="cpu") ** torch.tensor(powers, device="cpu").int()

    rest = series(2 * size, range(1, 2 * (num_heads - size) + 1, 2))
    return tuple(torch.cat([series(size, range(1, size + 1)), rest]).to(dtype).tolist())


def _bloom(config: Any) -> Options:
    alibi = AlibiConfig(slopes=_slopes(config.n_head), rounds="model")
    return {**_without_rotation(config), "alibi": alibi}


def _refuse(config: Any, key: str, found: object, wanted: object) -> None:
    """Raises ModelNotSupportedError unless the value is the only one that is served."""
    if found != wanted:
        raise ModelNotSupportedError(
            f"{key} = {found!r} of this {config.model_type} model is not supported, only {wanted!r}"
        )


def _mpt(config: Any) -> Options:
    """transformers' model reads neither the biases of a bias-free model nor another attention. It
    does not read alibi_bias_max either, with which models were trained (16 in MPT-7B-StoryWriter)
    and which is read here."""
    attention = config.attn_config
    for key in ("clip_qkv", "qk_ln", "prefix_lm"):
        _refuse(config, f"attn_config.{key}", getattr(attention, key) or None, None)
    _refuse(config, "attn_config.alibi", attention.alibi, True)
    _refuse(config, "attn_config.attn_type", attention.attn_type, "multihead_attention")
    _refuse(config, "expansion_ratio", config.expansion_ratio, 4)
    _refuse(config, "logit_scale", config.logit_scale, None)
    _refuse(config, "no_bias", config.no_bias, True)
    size = 2 ** math.ceil(math.log2(config.n_heads))
    slopes = [2.0 ** -(power * attention.alibi_bias_max / size) for power in range(1, size + 1)]
    if size != config.n_heads:
        slopes = [*slopes[1::2], *slopes[::2]][: config.n_heads]
    return {
        **_without_rotation(config),
        "alibi": AlibiConfig(slopes=tuple(slopes)),
        "score_scale": attention.softmax_scale,
    }


def _falcon_rotary(config: Any) -> RotaryConfig:
    return _unrotated(config) if config.alibi else rotary_config(config)


def _falcon(config: Any) -> Options:
    """Layers in parallel have one norm, those of the new architecture mostly two."""
    is_new, num_heads = config.new_decoder_architecture, config.num_attention_heads
    num_norms = config.num_ln_in_parallel_attn or (2 if is_new else 1)
    if is_new:
        _refuse(config, "parallel_attn with new_decoder_architecture", config.parallel_attn, True)
    else:
        _refuse(config, "num_ln_in_parallel_attn", num_norms, 1)
    found: dict[str, Any] = {
        "num_kv_heads": config.num_kv_heads if is_new or not config.multi_query else 1,
        "is_parallel": bool(config.parallel_attn),
        "has_mlp_norm": num_norms == 2,
        **dict.fromkeys(BIASES, bool(config.bias)),
    }
    if config.alibi:
        scale = (config.hidden_size // num_heads) ** -0.5
        slopes = _slopes(num_heads, torch.bfloat16)
        alibi = AlibiConfig(slopes=slopes, factor=scale, rounds="bfloat16")
        found |= {**_without_rotation(config), "alibi": alibi}
    return found


def _gpt_neo(config: Any) -> Options:
    windows = {"local": config.window_size, "global": None}
    return {
        **_without_rotation(config),
        "num_positions": config.max_position_embeddings,
        "windows": tuple(windows[kind] for kind in config.attention_layers),
    }


TOP = r"^(transformer\.)?"  # checkpoints of the base model have none
BLOOM = Family(
    options={
        **BIASES,
        "has_gate": False,
        "has_embed_norm": True,
        "activation": "gelu_pytorch_tanh",
    },
    more=_bloom,
    rotary=_unrotated,
    intermediate_size=_four_times,
    has_fused_heads=True,
    renames=(
        (TOP + r"word_embeddings_layernorm\.", "model.embed_norm."),
        (TOP + r"word_embeddings\.", "model.embed_tokens."),
        (TOP + r"ln_f\.", "model.norm."),
        (TOP + r"h\.", "model.layers."),
        (r"\.self_attention\.query_key_value\.", ".self_attn.qkv_proj."),
        (r"\.self_attention\.dense\.", ".self_attn.o_proj."),
        (r"\.dense_h_to_4h\.", ".fc1."),
        (r"\.dense_4h_to_h\.", ".fc2."),
    ),
)
FALCON = Family(
    options={"has_gate": False},
    more=_falcon,
    own=(
        *("alibi", "bias", "ffn_hidden_size", "multi_query", "new_decoder_architecture"),
        *("num_kv_heads", "num_ln_in_parallel_attn", "parallel_attn"),
    ),
    rotary=_falcon_rotary,
    intermediate_size=lambda config: config.ffn_hidden_size,
    has_fused_heads=True,
    renames=(
        *BLOOM.renames,
        (r"\.ln_attn\.", ".input_layernorm."),
        (r"\.ln_mlp\.", ".post_attention_layernorm."),
    ),
)
MPT = Family(
    options={"has_gate": False, "has_norm_biases": False, "activation": "gelu"},
    more=_mpt,
    own=(
        *("attn_config", "expansion_ratio", "max_seq_len", "no_bias"),
        # Which its model never reads.
        *("learned_pos_emb", "init_device", "embedding_fraction", "norm_type"),
    ),
    rotary=_unrotated,
    intermediate_size=_four_times,
    renames=(
        (TOP + r"wte\.", "model.embed_tokens."),
        (TOP + r"norm_f\.", "model.norm."),
        (TOP + r"blocks\.", "model.layers."),
        (r"\.norm_1\.", ".input_layernorm."),
        (r"\.norm_2\.", ".post_attention_layernorm."),
        (r"\.attn\.Wqkv\.", ".self_attn.qkv_proj."),
        (r"\.attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.ffn\.up_proj\.", ".mlp.fc1."),
        (r"\.ffn\.down_proj\.", ".mlp.fc2."),
    ),
)
GPT_NEO = Family(
    # Its scores are not scaled.
    options={"out_bias": True, "mlp_bias": True, "has_gate": False, "score_scale": 1.0},
    more=_gpt_neo,
    own=("attention_types", "attention_layers", "window_size"),
    rotary=_unrotated,
    intermediate_size=lambda config: config.intermediate_size or _four_times(config),
    renames=(
        (TOP + r"wte\.", "model.embed_tokens."),
        (TOP + r"wpe\.", "model.embed_positions."),
        (TOP + r"ln_f\.", "model.norm."),
        (TOP + r"h\.", "model.layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.c_fc\.", ".fc1."),
        (r"\.c_proj\.", ".fc2."),
    ),
    ignored=(r"\.attn\.attention\.(bias|masked_bias)$",),
)
