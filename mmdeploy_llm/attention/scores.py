"""Attention in plain torch over keys and values that lie in one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scales and caps attention scores; see forward.AttentionContext."""

    scale: float
    softcap: float | None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """Returns attention of `q` [..., n, D] over `k`, `v` [..., L, D], [..., n, D]. mask: [n, L]
        or alike, True for visible keys. is_causal: without a mask, and n = L."""
        if self.softcap is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=self.scale
            )
        # torch's own attention has no softcap.
        scores = q.float() @ k.float().transpose(-1, -2) * self.scale
        scores = self.softcap * torch.tanh(scores / self.softcap)
        if mask is None and is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (scores.softmax(-1) @ v.float()).to(q.dtype)
