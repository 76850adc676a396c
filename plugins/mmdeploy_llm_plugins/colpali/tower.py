"""The vision tower of ColPali and ColModernVBert, which is SigLIP's."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import PlainVisionConfig

# From its published names to ours, after "visual.".
TOWER_NAMES = (
    (r"^visual\.head\.", "unused."),
    (r"^visual\.embeddings\.patch_embedding\.", "visual.patch_embed.proj."),
    (r"^visual\.embeddings\.position_embedding\.weight$", "visual.positions"),
    (r"^visual\.encoder\.layers\.", "visual.blocks."),
    (r"^(visual\.blocks\.\d+)\.layer_norm", r"\1.norm"),
    (r"^(visual\.blocks\.\d+)\.self_attn\.out_proj\.", r"\1.attn.proj."),
    (r"^(visual\.blocks\.\d+)\.self_attn\.", r"\1.attn."),
)


def plain_tower(vision: Any, *, merge_size: int) -> PlainVisionConfig:
    """Converts the config of the tower. Raises ModelNotSupportedError for another one, and for
    patches that do not divide into blocks."""
    if vision.model_type != "siglip_vision_model":
        raise ModelNotSupportedError(
            f"the vision model {vision.model_type!r} of this checkpoint is not supported, only "
            "'siglip_vision_model'"
        )
    side = vision.image_size // vision.patch_size
    if side * vision.patch_size != vision.image_size or side % merge_size:
        raise ModelNotSupportedError(
            f"image_size = {vision.image_size}, patch_size = {vision.patch_size} and blocks of "
            f"{merge_size} x {merge_size} patches of this checkpoint do not divide"
        )
    return PlainVisionConfig(
        size=vision.hidden_size,
        intermediate_size=vision.intermediate_size,
        num_layers=vision.num_hidden_layers,
        num_heads=vision.num_attention_heads,
        image_side=side,
        merge_size=merge_size,
        patch_size=vision.patch_size,
        norm_eps=vision.layer_norm_eps,
        activation=vision.hidden_act,
        num_channels=vision.num_channels,
    )
