"""GatedAttention: attention whose output is multiplied by the sigmoid of a projection of its
input."""

from __future__ import annotations

import torch
from torch import Tensor

from .decoder import Attention, DecoderStep
from .decoder_config import DecoderConfig
from .linear import MergedLinear


class GatedAttention(Attention):
    """Grouped-query attention with a gate for each channel of its output (Qwen3-Next, Qwen3.5). The
    rows of q_proj hold query and gate of each head in turn."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__(config, layer)
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": 2 * size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.qkv_bias)

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """Computes attention with its projections and gate, [T, hidden] -> [T, hidden]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        rows = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        both, k, v = rows.split([2 * heads, kv_heads, kv_heads], 1)
        q, gate = both.unflatten(1, (heads, 2)).unbind(2)
        rope = step.rope_for(self.window)
        qk = self._rotated(torch.cat([q, k], 1), rope)
        attended = step.attn.attend(self.layer, qk[:, :heads], qk[:, heads:], v, **self.options)
        out: Tensor = self.o_proj((attended * gate.sigmoid()).flatten(1))
        return out
