"""The vision tower of GLM-4V and GLM-OCR: patches of two frames, attention within a frame, a
convolution that merges the patches of a block, and a gated MLP."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import (
    Activation,
    GatedMLP,
    Grid,
    LayerNorm,
    Linear,
    PatchEmbed,
    PositionTable,
    RMSNorm,
    Rotary,
    Segments,
    VisionAttention,
    VisionBlock,
    axial_rotary,
    frame_lengths,
    patch_positions,
    vision_theta,
)

MERGER_EPS = 1e-5  # not in the config


class Merger(nn.Module):
    """Computes the tokens of the decoder from merged patches."""

    def __init__(self, size: int, inner_size: int) -> None:
        super().__init__()
        self.proj = Linear(size, size)
        self.post_projection_norm = LayerNorm(size, MERGER_EPS)
        self.activation = Activation("gelu")
        self.mlp = GatedMLP(size, inner_size)

    def forward(self, x: Tensor) -> Tensor:
        """[M, size] -> [M, size]."""
        out: Tensor = self.mlp(self.activation(self.post_projection_norm(self.proj(x))))
        return out


class GlmTower(nn.Module):
    """Pixels [P, patch_dim] of all grids -> tokens of all grids [M, out_hidden_size]. GLM-OCR has
    biases, norms on the heads of query and key, and no learned positions."""

    def __init__(self, config: Any) -> None:
        """Raises ModelNotSupportedError for another activation than silu."""
        super().__init__()
        if config.hidden_act != "silu":
            raise ModelNotSupportedError(
                f"hidden_act {config.hidden_act!r} of the vision tower is not supported, only "
                "'silu'"
            )
        is_ocr = type(config).model_type == "glm_ocr_vision"  # files may say otherwise
        size, out, patch = config.hidden_size, config.out_hidden_size, config.patch_size
        norm = partial(RMSNorm, size, config.rms_norm_eps)
        self.merge_size = config.spatial_merge_size
        patch_shape = (config.in_channels, config.temporal_patch_size, patch, patch)
        self.patch_embed = PatchEmbed(size, patch_shape, bias=True)
        self.post_conv_layernorm = self.pos_embed = None
        if not is_ocr:
            self.post_conv_layernorm = norm()
            num_cells = (config.image_size // patch) ** 2
            self.pos_embed = PositionTable(num_cells, size, align_corners=False, mode="bicubic")
        self.rotary = Rotary(axial_rotary(size // config.num_heads, vision_theta(config)))
        self.blocks = nn.ModuleList(
            VisionBlock(
                size,
                config.num_heads,
                norm=norm,
                attn=_attention(config, is_ocr=is_ocr),
                mlp=_mlp(config, is_ocr=is_ocr),
            )
            for _ in range(config.depth)
        )
        self.post_layernorm = norm()
        self.downsample = PatchEmbed(out, (size, self.merge_size, self.merge_size), bias=True)
        self.merger = Merger(out, out * config.in_channels if is_ocr else config.intermediate_size)

    def forward(self, pixels: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Returns the tokens in the order of the pixels."""
        x = self.patch_embed(pixels)
        if self.post_conv_layernorm is not None and self.pos_embed is not None:
            x = self.post_conv_layernorm(x).add_(self.pos_embed(grids, self.merge_size))
        rope = self.rotary(patch_positions(grids, self.merge_size, x.device))
        segments = Segments(frame_lengths(grids), x.device)
        for block in self.blocks:
            x = block(x, segments, rope)
        # A convolution reads a block channel by channel, not patch by patch.
        blocks = self.post_layernorm(x).view(-1, self.merge_size**2, x.shape[1]).transpose(1, 2)
        out: Tensor = self.merger(self.downsample(blocks.flatten(1)))
        return out


def _attention(config: Any, *, is_ocr: bool) -> VisionAttention:
    return VisionAttention(
        config.hidden_size,
        config.num_heads,
        qkv_bias=config.attention_bias,
        out_bias=is_ocr and config.attention_bias,
        qk_norm_eps=config.rms_norm_eps if is_ocr else None,
    )


def _mlp(config: Any, *, is_ocr: bool) -> GatedMLP:
    """Returns the MLP of a block; the width of GLM-4V's is the config's out_hidden_size."""
    inner_size = config.intermediate_size if is_ocr else config.out_hidden_size
    return GatedMLP(config.hidden_size, inner_size, bias=is_ocr and config.attention_bias)
