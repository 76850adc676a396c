"""Building blocks for model authors: linear, norm, rotary embedding, MLP, mixture of experts, the
standard decoder, vision transformer.

Every module takes and returns plain tensors on one device. Its weights come from a checkpoint: the
values of a new module are undefined until weights.load has filled it.

Names are imported when they are first used: what only reads the settings of adapters or of pooling
imports no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmdeploy_llm.kernels import Gates, RouteRule
    from mmdeploy_llm.kernels.plain import has_product, quick_gelu
    from mmdeploy_llm.layers.basic.experts import Experts
    from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
    from mmdeploy_llm.layers.basic.linear import Embedding, Linear, MergedLinear, keep_sums
    from mmdeploy_llm.layers.basic.mlp import MLP, Activation, GatedMLP
    from mmdeploy_llm.layers.basic.norm import LateRMSNorm, LayerNorm, RMSNorm, ZeroCenteredRMSNorm
    from mmdeploy_llm.layers.basic.rotary import (
        Rotary,
        RotaryConfig,
        alternating_axes,
        sectioned_axes,
    )
    from mmdeploy_llm.layers.states.gated_delta import GatedDeltaConfig, GatedDeltaNet
    from mmdeploy_llm.layers.states.mamba2 import Mamba2, Mamba2Config
    from mmdeploy_llm.layers.states.short_conv import GatedShortConv
    from mmdeploy_llm.layers.transfer import to_device

    from .decoder import Attention, CausalLM, Decoder, DecoderLayer, DecoderStep, NewLayer
    from .decoder_config import AlibiConfig, DecoderConfig
    from .from_config import (
        layer_rotaries,
        layer_windows,
        refuse_unread,
        rotary_config,
        sparse_layers,
        standard_decoder,
    )
    from .gated_attention import GatedAttention
    from .grid_lm import GridLM, media_grid
    from .group_router import GroupRouter
    from .moe import MoEConfig, SoftmaxRouter
    from .plain_vision import (
        PlainVisionAttention,
        PlainVisionBlock,
        PlainVisionConfig,
        PlainVisionEncoder,
        in_blocks,
    )
    from .vision import (
        Grid,
        PatchEmbed,
        PositionTable,
        Segments,
        VisionAttention,
        VisionBlock,
        VisionConfig,
        VisionEncoder,
        axial_rotary,
        frame_lengths,
        grid_positions,
        patch_positions,
        vision_activation,
        vision_theta,
    )

__all__ = [
    "MLP",
    "Activation",
    "AlibiConfig",
    "Attention",
    "CausalLM",
    "Decoder",
    "DecoderConfig",
    "DecoderLayer",
    "DecoderStep",
    "Embedding",
    "Experts",
    "GatedAttention",
    "GatedDeltaConfig",
    "GatedDeltaNet",
    "GatedMLP",
    "GatedShortConv",
    "Gates",
    "Grid",
    "GridLM",
    "GroupRouter",
    "KernelLayer",
    "LateRMSNorm",
    "LayerNorm",
    "Linear",
    "Mamba2",
    "Mamba2Config",
    "MergedLinear",
    "MoEConfig",
    "NewLayer",
    "PatchEmbed",
    "PlainVisionAttention",
    "PlainVisionBlock",
    "PlainVisionConfig",
    "PlainVisionEncoder",
    "PositionTable",
    "RMSNorm",
    "Rotary",
    "RotaryConfig",
    "RouteRule",
    "Segments",
    "SoftmaxRouter",
    "VisionAttention",
    "VisionBlock",
    "VisionConfig",
    "VisionEncoder",
    "ZeroCenteredRMSNorm",
    "alternating_axes",
    "axial_rotary",
    "frame_lengths",
    "grid_positions",
    "has_product",
    "in_blocks",
    "keep_sums",
    "layer_rotaries",
    "layer_windows",
    "media_grid",
    "patch_positions",
    "quick_gelu",
    "refuse_unread",
    "rotary_config",
    "sectioned_axes",
    "sparse_layers",
    "standard_decoder",
    "to_device",
    "vision_activation",
    "vision_theta",
]

_HOMES = {
    "MLP": ".basic.mlp",
    "Activation": ".basic.mlp",
    "AlibiConfig": ".decoder_config",
    "Attention": ".decoder",
    "CausalLM": ".decoder",
    "Decoder": ".decoder",
    "DecoderConfig": ".decoder_config",
    "DecoderLayer": ".decoder",
    "DecoderStep": ".decoder",
    "Embedding": ".basic.linear",
    "Experts": ".basic.experts",
    "GatedAttention": ".gated_attention",
    "GatedDeltaConfig": ".states.gated_delta",
    "GatedDeltaNet": ".states.gated_delta",
    "GatedMLP": ".basic.mlp",
    "GatedShortConv": ".states.short_conv",
    "Gates": "mmdeploy_llm.kernels",
    "Grid": ".vision",
    "GridLM": ".grid_lm",
    "GroupRouter": ".group_router",
    "KernelLayer": ".basic.kernel_layer",
    "LateRMSNorm": ".basic.norm",
    "LayerNorm": ".basic.norm",
    "Linear": ".basic.linear",
    "Mamba2": ".states.mamba2",
    "Mamba2Config": ".states.mamba2",
    "MergedLinear": ".basic.linear",
    "MoEConfig": ".moe",
    "NewLayer": ".decoder",
    "PatchEmbed": ".vision",
    "PlainVisionAttention": ".plain_vision",
    "PlainVisionBlock": ".plain_vision",
    "PlainVisionConfig": ".plain_vision",
    "PlainVisionEncoder": ".plain_vision",
    "PositionTable": ".vision",
    "RMSNorm": ".basic.norm",
    "Rotary": ".basic.rotary",
    "RotaryConfig": ".basic.rotary",
    "RouteRule": "mmdeploy_llm.kernels",
    "Segments": ".vision",
    "SoftmaxRouter": ".moe",
    "VisionAttention": ".vision",
    "VisionBlock": ".vision",
    "VisionConfig": ".vision",
    "VisionEncoder": ".vision",
    "ZeroCenteredRMSNorm": ".basic.norm",
    "alternating_axes": ".basic.rotary",
    "axial_rotary": ".vision",
    "frame_lengths": ".vision",
    "grid_positions": ".vision",
    "has_product": "mmdeploy_llm.kernels.plain",
    "in_blocks": ".plain_vision",
    "keep_sums": ".basic.linear",
    "layer_rotaries": ".from_config",
    "layer_windows": ".from_config",
    "media_grid": ".grid_lm",
    "patch_positions": ".vision",
    "quick_gelu": "mmdeploy_llm.kernels.plain",
    "refuse_unread": ".from_config",
    "rotary_config": ".from_config",
    "sectioned_axes": ".basic.rotary",
    "sparse_layers": ".from_config",
    "standard_decoder": ".from_config",
    "to_device": ".transfer",
    "vision_activation": ".vision",
    "vision_theta": ".vision",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from the module that defines it (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
