"""The plain vision transformer (ViT, SigLIP, InternViT): images of one fixed square size, learned
positions, attention within an image.

Patches come in blocks of merge x merge, as image processors of this package order them, so that
pixel shuffle (merging the patches of a block into one token) is a view.

Shapes: I images, N patches of one image, P = I * N patches of all, D size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import Linear, MergedLinear, empty_parameter
from mmdeploy_llm.layers.basic.mlp import MLP
from mmdeploy_llm.layers.basic.norm import LayerNorm, RMSNorm

from .vision import PatchEmbed, Segments, vision_activation


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainVisionConfig:
    """Sizes and options of a PlainVisionEncoder.

    image_side: patches along a side of an image. merge_size: patches along a side of a block.
    activation: transformers' name.
    has_class_token: a learned token is computed together with the patches of each image.
    qk_norm_eps: of norms over all heads of query and key together; None: there are none.
    has_layer_scale: the outputs of attention and MLP are multiplied by learned factors.
    """

    size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_side: int
    merge_size: int
    patch_size: int
    norm_eps: float
    activation: str
    norm: Literal["layer_norm", "rms_norm"] = "layer_norm"
    num_channels: int = 3
    attention_bias: bool = True
    has_class_token: bool = False
    qk_norm_eps: float | None = None
    has_layer_scale: bool = False


class PlainVisionAttention(KernelLayer):
    """Multi-head attention within images, without rotary embedding. Checkpoint names: q_proj,
    k_proj, v_proj, proj; q_norm and k_norm if there are norms."""

    def __init__(
        self, size: int, num_heads: int, *, bias: bool = True, qk_norm_eps: float | None = None
    ) -> None:
        """bias: of query, key and value. qk_norm_eps: see PlainVisionConfig."""
        super().__init__()
        self.num_heads = num_heads
        self.qkv = MergedLinear(size, {"q_proj": size, "k_proj": size, "v_proj": size}, bias=bias)
        self.proj = Linear(size, size, bias=True)
        has_norms = qk_norm_eps is not None
        self.q_norm = RMSNorm(size, qk_norm_eps or 0.0) if has_norms else None
        self.k_norm = RMSNorm(size, qk_norm_eps or 0.0) if has_norms else None

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Computes attention with its projections, [P, D] -> [P, D]."""
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q.contiguous()), self.k_norm(k.contiguous())
        q, k, v = (part.view(x.shape[0], self.num_heads, -1) for part in (q, k, v))
        out: Tensor = self.proj(segments.attend(q, k, v, self.kernels).flatten(1))
        return out


class PlainVisionBlock(nn.Module):
    """Attention and MLP, each after its norm, each scaled where the config says so."""

    def __init__(self, config: PlainVisionConfig) -> None:
        super().__init__()
        size = config.size
        norm = _norm(config)
        self.norm1, self.norm2 = norm(), norm()
        self.attn = PlainVisionAttention(
            size, config.num_heads, bias=config.attention_bias, qk_norm_eps=config.qk_norm_eps
        )
        activation = vision_activation(config.activation)
        self.mlp = MLP(size, config.intermediate_size, size, activation)
        self.scale1 = empty_parameter(size) if config.has_layer_scale else None
        self.scale2 = empty_parameter(size) if config.has_layer_scale else None

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Computes the block, [P, D] -> [P, D], in the memory of `x`."""
        x = x.add_(_scaled(self.attn(self.norm1(x), segments), self.scale1))
        return x.add_(_scaled(self.mlp(self.norm2(x)), self.scale2))


class PlainVisionEncoder(nn.Module):
    """Computes patch features [P, D] from the pixels [P, patch_dim] of images, both in blocks of
    merged patches."""

    def __init__(self, config: PlainVisionConfig) -> None:
        """Builds the layers. Raises ModelNotSupportedError for an unknown activation."""
        super().__init__()
        self.side, self.merge_size = config.image_side, config.merge_size
        num_patches, size = config.image_side**2, config.size
        patch_shape = (config.num_channels, config.patch_size, config.patch_size)
        self.patch_embed = PatchEmbed(size, patch_shape, bias=True)
        self.class_token = empty_parameter(1, 1, size) if config.has_class_token else None
        # One axis less without class tokens, as SigLIP's checkpoints have it.
        shape = (1, num_patches + 1, size) if config.has_class_token else (num_patches, size)
        self.positions = empty_parameter(*shape)
        self.blocks = nn.ModuleList(PlainVisionBlock(config) for _ in range(config.num_layers))

    def forward(self, pixels: Tensor) -> Tensor:
        """Returns [P, D] after the last layer, in the order of the pixels, without class tokens."""
        num_patches = self.side**2
        positions = self.positions.flatten(0, -2)
        first = positions.shape[0] - num_patches
        x = self.patch_embed(pixels).view(-1, num_patches, positions.shape[1])
        x = x + in_blocks(positions[first:], self.side, self.merge_size)
        if self.class_token is not None:
            tokens = self.class_token + positions[0]
            x = torch.cat([tokens.expand(x.shape[0], 1, -1), x], 1)
        segments = Segments([x.shape[1]] * x.shape[0], x.device)
        flat = x.flatten(0, 1)
        for block in self.blocks:
            flat = block(flat, segments)
        out: Tensor = flat.view(x.shape)[:, first:].flatten(0, 1)
        return out


def in_blocks(rows: Tensor, side: int, merge: int) -> Tensor:
    """Orders the rows [side ** 2, D] of a square, which are line by line, in blocks of merge x
    merge. `side` is a multiple of `merge`."""
    num = side // merge
    return rows.view(num, merge, num, merge, -1).transpose(1, 2).reshape(side * side, -1)


def _norm(config: PlainVisionConfig) -> Callable[[], nn.Module]:
    """Returns what builds a norm of the config's kind."""
    kind = LayerNorm if config.norm == "layer_norm" else RMSNorm
    return partial(kind, config.size, config.norm_eps)


def _scaled(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x.mul_(scale)
