"""GatedAttention: attention whose output is multiplied by the sigmoid of a projection of its
input."""

from __future__ import annotations

import torch
from torch import Tensor

from mmdeploy_llm.layers.basic.kernel_layer import KernelLayer
from mmdeploy_llm.layers.basic.linear import MergedLinear
from mmdeploy_llm.layers.basic.rotary import Rope

from .decoder import Attention, DecoderStep
from .decoder_config import DecoderConfig


class GatedAttention(Attention, KernelLayer):
    """Grouped-query attention with a gate for each channel of its output. The
    rows of q_proj hold query and gate of each head in turn."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        assert not config.has_full_qk_norm, "queries lie between gates: no norm over all heads"
        super().__init__(config, layer)
        size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": 2 * size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(config.hidden_size, parts, bias=config.qkv_bias)

    def forward(self, x: Tensor, step: DecoderStep) -> Tensor:
        """Computes attention with its projections and gate, [T, hidden] -> [T, hidden]."""
        heads, kv_heads = self.num_heads, self.num_kv_heads
        rows = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        both, k, v = torch.split(rows, [2 * heads, kv_heads, kv_heads], 1)
        q, gate = both[:, ::2], both[:, 1::2]
        q, k = self._rotated_apart(q, k, self.own_rope or step.rope_for(self.window))
        attended = step.attn.attend(self.layer, q, k, v, **self.options)
        out: Tensor = self.o_proj(self._gated(attended, gate).flatten(1))
        return out

    def _rotated_apart(self, q: Tensor, k: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        """Returns the heads of `q` and `k` after norm, if the model has one, and rotation."""
        if self.q_norm is None or self.k_norm is None:
            return rope.rotate(q), rope.rotate(k)
        return rope.norm_and_rotate_apart(q, k, self.q_norm, self.k_norm)

    def _gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """Returns x * sigmoid(gate), [T, H, D], which may overwrite `x`."""
        return self.kernels.gate_heads(x, gate)
