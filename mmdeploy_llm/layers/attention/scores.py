"""Attention in plain torch over keys and values that lie in one tensor."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scales and caps attention scores; see forward.AttentionContext. biases: added to the scores
    [..., n, L] then, of their shape or one that is expanded to it."""

    scale: float
    softcap: float | None
    sinks: Tensor | None = None
    biases: Tensor | None = None

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, is_causal: bool = False
    ) -> Tensor:
        """Returns attention of `q` [..., n, D] over `k`, `v` [..., L, D], [..., n, D]. mask: [n, L]
        or alike, True for visible keys. is_causal: without a mask, and n = L. The sinks have been
        viewed to the shape of the scores [..., n, L], or one that is expanded to it."""
        if self.softcap is None and self.sinks is None and self.biases is None:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=is_causal, scale=self.scale
            )
        return self._in_float32(q, k, v, mask, is_causal)

    def _in_float32(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Computes what torch's own attention lacks (softcaps, sinks), or would round (biases)."""
        scores = q.float() @ k.float().transpose(-1, -2) * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.biases is not None:
            scores = scores + self.biases
        if mask is None and is_causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return (_weights(scores, self.sinks) @ v.float()).to(q.dtype)

    def viewed(self, *shape: int) -> Scores:
        """Returns the same scores with sinks of another shape, for `attend`."""
        return self if self.sinks is None else replace(self, sinks=self.sinks.view(shape))


def _weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Returns the softmax of scores [..., n, L]; a sink is a score more, whose weight is lost."""
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
