"""Reads and checks the options of InternVL's vision tower."""

from __future__ import annotations

from typing import Any, NoReturn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import PlainVisionConfig

QK_NORM_EPS = 1e-6  # not in the config
NORMS = ("layer_norm", "rms_norm")
# Options of a config, whose other values belong to models that were never published.
FIXED = {"vision_feature_layer": -1, "vision_feature_select_strategy": "default"}
COUNTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def tower_config(config: Any) -> PlainVisionConfig:
    """Converts the vision config. Raises ModelNotSupportedError for a value that the tower does not
    implement, or that no tower can have."""
    vision, merge = config.vision_config, merge_size(config)
    for name, allowed in FIXED.items():
        if getattr(config, name) != allowed:
            _refuse(name, getattr(config, name), repr(allowed))
    for name in (*COUNTS, "num_channels"):
        _check_count(name, getattr(vision, name))
    if vision.hidden_size % vision.num_attention_heads:
        _refuse("num_attention_heads", vision.num_attention_heads, "a divisor of hidden_size")
    if vision.norm_type not in NORMS:
        _refuse("norm_type", vision.norm_type, " or ".join(NORMS))
    if not vision.use_absolute_position_embeddings:
        _refuse("use_absolute_position_embeddings", False, "True")
    image, patch = square("image_size", vision), square("patch_size", vision)
    factor = patch * merge
    if image % factor:
        _refuse("image_size", image, f"a multiple of patch_size / downsample_ratio = {factor}")
    return PlainVisionConfig(
        size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        image_side=image // patch,
        merge_size=merge,
        patch_size=patch,
        num_channels=vision.num_channels,
        norm=vision.norm_type,
        norm_eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
        attention_bias=vision.attention_bias,
        has_class_token=True,
        qk_norm_eps=QK_NORM_EPS if vision.use_qk_norm else None,
        has_layer_scale=True,
    )


def merge_size(config: Any) -> int:
    """Returns the patches along a side of the block that becomes a token, the inverse of
    downsample_ratio. Raises ModelNotSupportedError unless that is a whole number."""
    ratio = config.downsample_ratio
    is_number = isinstance(ratio, (int, float)) and 0 < ratio <= 1
    merge = round(1 / ratio) if is_number and ratio > 1e-3 else 0
    if not merge or abs(merge * ratio - 1) > 1e-6:
        _refuse("downsample_ratio", ratio, "1, 1/2, 1/3, 1/4, ...")
    return merge


def square(name: str, vision: Any) -> int:
    """Returns the side that a field gives as (side, side). Raises ModelNotSupportedError for two
    sides that differ."""
    value = getattr(vision, name)
    sides = value if isinstance(value, (list, tuple)) else (value, value)
    if len(sides) != 2 or sides[0] != sides[1]:
        _refuse(name, value, "a square")
    _check_count(name, sides[0])
    return int(sides[0])


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _refuse(name, value, "a whole number above 0")


def _refuse(name: str, value: Any, allowed: str) -> NoReturn:
    raise ModelNotSupportedError(
        f"{name} = {value!r:.80} of this InternVL checkpoint is not supported; it must be {allowed}"
    )
