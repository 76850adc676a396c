"""Whisper's encoder: two convolutions over mel frames, and layers that attend to a whole window.

Shapes: N windows, F frames of each, L = F / 2 tokens of each, T tokens of all windows.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmdeploy_llm.errors import ModelNotSupportedError
from mmdeploy_llm.layers import MLP, KernelLayer, LayerNorm, Linear, MergedLinear, Segments
from mmdeploy_llm_plugins.encoder_decoder.decoder import NORM_EPS, activation_of
from mmdeploy_llm_plugins.transformers_parts.wide_conv import WideConv1d

# transformers bounds the values of a layer in float16 by the largest finite one less this.
MARGIN = 1000


class EncoderAttention(KernelLayer):
    """Attention within a window. Keys have no bias."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.shape = (-1, num_heads, size // num_heads)
        self.qv_proj = MergedLinear(size, {"q_proj": size, "v_proj": size}, bias=True)
        self.k_proj = Linear(size, size)
        self.out_proj = Linear(size, size, bias=True)

    def forward(self, x: Tensor, windows: Segments) -> Tensor:
        """Computes attention with its projections, [T, size] -> [T, size]."""
        q, v = self.qv_proj(x).chunk(2, -1)
        k = self.k_proj(x)
        v = v.contiguous()  # the kernels read keys and values with one stride
        q, k, v = (part.view(self.shape) for part in (q, k, v))
        out: Tensor = self.out_proj(windows.attend(q, k, v, self.kernels).flatten(1))
        return out


class EncoderLayer(nn.Module):
    """Attention and MLP, each after its norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size = config.d_model
        self.self_attn = EncoderAttention(size, config.encoder_attention_heads)
        activation = activation_of(config.activation_function)
        self.mlp = MLP(size, config.encoder_ffn_dim, size, activation)
        self.self_norm, self.mlp_norm = (LayerNorm(size, NORM_EPS) for _ in range(2))

    def forward(self, x: Tensor, windows: Segments) -> Tensor:
        """Computes the layer, [T, size] -> [T, size], in the memory of `x`."""
        x = x.add_(self.self_attn(self.self_norm(x), windows))
        x = x.add_(self.mlp(self.mlp_norm(x)))
        if x.dtype == torch.float16:
            most = torch.finfo(torch.float16).max - MARGIN
            x = x.clamp_(-most, most)
        return x


class Encoder(nn.Module):
    """Computes the hidden states of windows."""

    def __init__(self, config: Any) -> None:
        """Raises ModelNotSupportedError for an unknown activation, and for heads that do not divide
        the hidden size."""
        super().__init__()
        size, num_heads = config.d_model, config.encoder_attention_heads
        if size % num_heads:
            raise ModelNotSupportedError(
                f"d_model {size} of Whisper's encoder is no multiple of its {num_heads} "
                "attention heads"
            )
        # transformers has scale_embedding in the config, and does not read it.
        self.conv1 = WideConv1d(config.num_mel_bins, size, kernel_size=3, padding=1)
        self.conv2 = WideConv1d(size, size, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, size)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.layer_norm = LayerNorm(size, NORM_EPS)

    def forward(self, frames: Tensor) -> Tensor:
        """Computes all windows, [N, mel bins, F] -> [N, L, size]. F is what the positions are
        for: the processor pads a window."""
        positions = self.embed_positions.weight
        x = F.gelu(self.conv1(frames.to(positions.device, positions.dtype)))
        x = F.gelu(self.conv2(x)).mT + positions
        windows = Segments([len(positions)] * len(x), x.device)
        flat = x.flatten(0, 1)
        for layer in self.layers:
            flat = layer(flat, windows)
        out: Tensor = self.layer_norm(flat)
        return out.view(x.shape)
