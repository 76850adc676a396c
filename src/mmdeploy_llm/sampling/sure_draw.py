"""Draws without a softmax over the vocabulary, where its rounding cannot matter.

    logits --weigh--> the sum of exp(z), nearly --> the shares of the largest logits, nearly
           --> the uniform number so far from the borders of its token that none of the sets of
               tokens that top_p may keep, and no rounding, moves one past it: the token that
               draw.py finds; otherwise draw.py computes the softmax

Most rows are sure, and a draw by top_p alone, or without a rule, then reads each logit twice and
writes none.

Shapes: R rows, V vocabulary, K prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.kernels import DrawKernels

from .draw_params import DrawParams, take_rows

# torch divides by a sum in float32, of four or more sums of values one after the other.
SUM_ERROR = 2.0**-26  # of the sum, for each value
SHARE_ERROR = 2.0**-21  # of a share of several exponentials, each of which is rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class SureDraw:
    """tokens: [R]. is_sure: whether a token is that of the softmax, [R]. is_too_short: whether
    top_p surely keeps the last token of the prefix, and perhaps more beyond it, [R]."""

    tokens: Tensor
    is_sure: NDArray[np.bool_]
    is_too_short: NDArray[np.bool_]


def draw_surely(logits: Tensor, params: DrawParams, size: int, kernels: DrawKernels) -> SureDraw:
    """Draws from logits [R, V] by top_p alone, or without a rule where it is 1. size: of the
    prefix, the largest logits, from which top_p draws."""
    top_p, temperature = params.top_p, torch.from_numpy(params.temperature)
    sums, tokens = kernels.weigh(logits, temperature, torch.from_numpy(params.uniforms))
    is_sure, is_too_short = (tokens >= 0).numpy(), np.zeros(len(tokens), dtype=np.bool_)
    rows = np.flatnonzero(top_p < 1)
    if len(rows):
        values, ids = kernels.largest(take_rows(logits, rows), size)  # [R, K]
        z = (values - values[:, :1]) / temperature[rows, None]
        shares = z.double().exp_() / sums[rows, None]
        error = logits.shape[1] * SUM_ERROR + SHARE_ERROR
        fewest, most = _kept(shares, z, top_p[rows], error)
        surely, perhaps = shares * fewest, shares * (most & ~fewest)
        tokens[rows], is_known = _inverted(surely, perhaps, ids, params.uniforms[rows])
        is_too_short[rows] = fewest[:, -1].numpy()
        is_sure[rows] = is_known.numpy() & ~most[:, -1].numpy()
    return SureDraw(tokens=tokens, is_sure=is_sure, is_too_short=is_too_short)


def _kept(
    shares: Tensor, z: Tensor, top_p: NDArray[np.float64], error: float
) -> tuple[Tensor, Tensor]:
    """Returns which of the descending z [R, K] top_p keeps at least, and which at most: [R, K] bool
    each. error: of the sum of any shares, as a share of it."""
    before = shares.cumsum(1) - shares  # of the larger values
    limit = torch.from_numpy(top_p)[:, None]
    counts = [(before * factor < limit).sum(1, keepdim=True) for factor in (1 + error, 1 - error)]
    fewest, most = (z >= z.gather(1, (count - 1).clamp_(min=0)) for count in counts)
    return fewest, most


def _inverted(
    surely: Tensor, perhaps: Tensor, ids: Tensor, uniforms: NDArray[np.float64]
) -> tuple[Tensor, Tensor]:
    """Returns the ids [R] at which the running sum of the shares that are surely kept [R, K], in
    the order of ids, exceeds the uniform number's share of their sum, and whether that is so with
    any of the tokens that are perhaps kept, too, [R] bool. perhaps: their shares, [R, K]."""
    ids, order = ids.sort(dim=1)
    shares = surely.gather(1, order)
    sums, others = shares.cumsum(1), perhaps.gather(1, order).cumsum(1)
    total, rest = sums[:, -1:], others[:, -1:]
    uniform = torch.from_numpy(uniforms)[:, None]
    target, margin = uniform * total, SHARE_ERROR * (total + rest)
    column = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    after, ahead = sums.gather(1, column), others.gather(1, column)
    before = after - shares.gather(1, column)
    # A share x moves the target up by uniform * x, and the borders that follow it by x: these two
    # too where it comes before this token, else the target alone.
    is_sure = before + (1 - uniform) * ahead + margin <= target
    is_sure &= target + uniform * (rest - ahead) + margin < after
    return ids.gather(1, column)[:, 0], is_sure[:, 0]
