"""The readable form of `draw`, one row at a time with full sorts: what the fast path is tested
against."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kept_tokens(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """[V] bool: the tokens that may be drawn from one row of logits [V]."""
    z = (logits.float() - logits.float().max()) / temperature
    kept = z > -torch.inf
    if min_p > 0:
        kept &= z >= math.log(min_p)
    if 0 < top_k < len(z):
        kept &= z >= z.sort(descending=True).values[top_k - 1]
    if top_p < 1:
        probs = probabilities(z, kept)
        order = probs.sort(descending=True).indices
        before = probs[order].cumsum(0) - probs[order]
        count = int((before < top_p).sum())
        kept &= z >= z[order[max(count - 1, 0)]]
    return kept


def probabilities(z: Tensor, kept: Tensor) -> Tensor:
    """[V] float64: softmax of z over the kept tokens, zero elsewhere."""
    return z.double().masked_fill(~kept, -torch.inf).softmax(0)


def draw_one(
    logits: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    """The first token at which the running sum of probabilities, in vocabulary order, passes
    `uniform`."""
    kept = kept_tokens(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs = probabilities((logits.float() - logits.float().max()) / temperature, kept)
    return int((probs.cumsum(0) <= uniform).sum().clamp(max=len(logits) - 1))
