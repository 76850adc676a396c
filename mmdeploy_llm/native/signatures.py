"""Argument types of the library's functions, for ctypes; see kernels.cpp."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any


class AttentionArgs(Structure):
    """Arguments of mm_attend, as in attention.h."""

    _fields_ = (
        ("q", c_void_p),
        ("q_stride", c_int64),
        ("q_head_stride", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("kv_stride", c_int64),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("sinks", c_void_p),
        ("out", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("block_size", c_int64),
        ("query_starts", c_void_p),
        ("first_seen", c_void_p),
        ("behind_seen", c_void_p),
        ("num_sequences", c_int64),
        ("num_heads", c_int64),
        ("num_kv_heads", c_int64),
        ("head_dim", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("num_threads", c_int32),
    )


class DeltaArgs(Structure):
    """Arguments of mm_delta_rule, as in states.h."""

    _fields_ = (
        ("qkv", c_void_p),
        ("qkv_stride", c_int64),
        ("z", c_void_p),
        ("z_stride", c_int64),
        ("a", c_void_p),
        ("b", c_void_p),
        ("ab_stride", c_int64),
        ("a_log", c_void_p),
        ("dt_bias", c_void_p),
        ("norm_weight", c_void_p),
        ("matrices", c_void_p),
        ("out", c_void_p),
        ("starts", c_void_p),
        ("read", c_void_p),
        ("write", c_void_p),
        ("num_sequences", c_int64),
        ("key_heads", c_int64),
        ("value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("eps", c_float),
        ("num_threads", c_int32),
    )


# Without a result, but for those in RESULTS.
SIGNATURES: dict[str, tuple[Any, ...]] = {
    "mm_look_up": (
        c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int32
    ),
    "mm_look_up_codes": (
        c_int32, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int32
    ),
    "mm_take_columns": (
        c_int32, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32
    ),
    "mm_angles": (
        c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_float, c_void_p, c_void_p, c_int64,
        c_int64, c_int32,
    ),
    "mm_rms_norm": (
        c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float,
        c_int32, c_int32,
    ),
    "mm_silu_mul": (
        c_int32, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32
    ),
    "mm_activate": (c_int32, c_int32, c_void_p, c_int64, c_int64, c_int32),
    "mm_norm_heads": (
        c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64, c_float, c_int32,
        c_int32,
    ),
    "mm_gate_heads": (
        c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64, c_int32
    ),
    "mm_rotate": (
        c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int32,
        c_int32,
    ),
    "mm_attend": (c_int32, c_int32, POINTER(AttentionArgs)),
    "mm_short_conv": (
        c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p,
        c_void_p, c_int64, c_int64, c_int32, c_int32,
    ),
    "mm_delta_rule": (c_int32, POINTER(DeltaArgs)),
    "mm_write_cache": (
        c_int32, c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64,
        c_int64, c_int32,
    ),
    "mm_pack_units": (c_void_p, c_int64, c_int64, c_int32, c_void_p, c_int32),
    "mm_linear_bf16": (
        c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32,
        c_void_p, c_int64,
    ),
    "mm_linear_f32": (
        c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int32,
        c_void_p, c_int64,
    ),
    "mm_widen_panels": (c_int32, c_void_p, c_int64, c_int64, c_void_p, c_int32),
    "mm_round_groups": (c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_int32),
    "mm_pack_s8": (c_void_p, c_int64, c_int64, c_void_p, c_int32),
    "mm_quantize_rows": (c_int32, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int32),
    "mm_linear_s8": (
        c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64,
        c_int64, c_int32, c_void_p, c_int64,
    ),
    "mm_run": (c_void_p, c_int64),
    "mm_largest": (
        c_int32, c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32
    ),
    "mm_first_largest": (
        c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32
    ),
    "mm_temper": (c_int32, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int32),
    "mm_round_codes": (
        c_int32, c_void_p, c_int64, c_int64, c_int32, c_int64, c_void_p, c_void_p, c_void_p, c_int32
    ),
    "mm_linear_codes": (
        c_int32, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64,
        c_int64, c_int64, c_int32, c_void_p, c_int64,
    ),
    "mm_cut": (
        c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int32
    ),
    "mm_invert": (c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int32),
    "mm_patchify": (
        c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64, c_int64, c_void_p
    ),
    "mm_place_threads": (c_void_p, c_int32, c_void_p, c_int32, c_int32, c_int32),
    "mm_vector_bytes": (),
}  # fmt: skip
RESULTS = {"mm_place_threads": c_int32, "mm_vector_bytes": c_int32}
