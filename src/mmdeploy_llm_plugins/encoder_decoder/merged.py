"""Attention to a sequence and to an encoder's item in one softmax."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

KeysValues = tuple[Tensor, Tensor]  # [L, K, D]


def merged_attention(
    q: Tensor,
    kept: KeysValues,
    item: KeysValues | None,
    num_cached: int,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Returns attention of the tokens of one sequence in a step, [n, H, D] -> [n, H, D].

    kept: of the sequence so far, or of its last tokens. item: all tokens see it. num_cached: tokens
    of the sequence before those of the step. window: a token sees this many last ones, itself
    included; None: all.
    """
    end = num_cached + q.shape[0]
    queries = torch.arange(num_cached, end, device=q.device)[:, None]
    tokens = torch.arange(end - kept[0].shape[0], end, device=q.device)
    seen = tokens <= queries
    if window is not None:
        seen &= tokens > queries - window
    keys, values = kept
    if item is not None:
        keys, values = (torch.cat(pair) for pair in zip(kept, item, strict=True))
        seen = F.pad(seen, (0, item[0].shape[0]), value=True)
    heads, keys, values = (part.transpose(0, 1)[None] for part in (q, keys, values))
    out = F.scaled_dot_product_attention(
        heads, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)
