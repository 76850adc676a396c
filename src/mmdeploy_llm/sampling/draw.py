"""Draws a token at random: min-p, top-k and top-p, mostly without sorting the vocabulary.

For one row, with z = (logit - largest logit) / temperature:

    min_p   keeps z >= log(min_p), that is p >= largest p * min_p
    top_k   keeps z >= the k-th largest z
    top_p   keeps z >= the z at which the probability mass of larger ones reaches top_p of the rest

Every rule keeps all values from a cutoff upwards, so that equal logits are kept or dropped together
and no result depends on the order in which a sort leaves them. One uniform number then selects a
token by inverse CDF, in vocabulary order.

A row is first drawn from its 64 largest logits, from its 1,024 when top_k keeps more, and from the
whole vocabulary when these may not be all. Which of them depends on that row alone, softmax works
row by row, and probabilities are whole multiples of 2**-50, whose sums are exact in any order: the
same row gives the same token in every batch. The CPU kernels compute the same values, or compute
nearly and see that it cannot matter (sure_draw.py), and therefore draw the same token.

Shapes: R rows, V vocabulary, K prefix, B blocks, W width of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.kernels import DrawKernels

from .draw_params import DrawParams, take_rows
from .largest import largest
from .sure_draw import draw_surely

UNITS = 2.0**50  # units in a probability of 1; sums stay below 2**53, where float64 is exact
PREFIX_SIZES = (64, 1024)
CHUNK_SIZE = 2**19  # logits in one operation over whole rows, to bound temporaries
WIDTH = 64


def draw(logits: Tensor, params: DrawParams, kernels: DrawKernels | None = None) -> Tensor:
    """Draws a token id for each row of logits [R, V], of any float dtype; [R] int64. Rows with NaN
    get an arbitrary id.

    kernels: CPU kernels for operations over the whole vocabulary, where they support the dtype.
    """
    if kernels is not None and not kernels.takes(logits):
        kernels = None
    num_rows, vocab_size = logits.shape
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    is_mixed = (params.top_k == 0) & (params.min_p == 0)  # no rule drops tokens before top_p
    has_no_rule = is_mixed & (params.top_p >= 1)
    is_drawn = np.zeros(num_rows, dtype=np.bool_)
    is_too_short = np.zeros(num_rows, dtype=np.bool_)  # the first prefix; see SureDraw
    rows = np.flatnonzero(is_mixed)
    if kernels is not None and len(rows) and vocab_size > PREFIX_SIZES[0]:
        own = params.take(rows)
        sure = draw_surely(take_rows(logits, rows), own, PREFIX_SIZES[0], kernels)
        tokens[rows], is_drawn[rows] = sure.tokens, sure.is_sure
        is_too_short[rows] = sure.is_too_short
    for size in (size for size in PREFIX_SIZES if size < vocab_size):
        # The prefix must hold the k-th value and one below it. Other rules keep either few tokens
        # or so many that a second prefix is wasted.
        is_tried = ~is_drawn & ~is_too_short & ~has_no_rule & (params.top_k < size)
        is_tried &= (params.top_k > 0) | (size == PREFIX_SIZES[0])
        for group, is_top_p_alone in ((is_mixed, True), (~is_mixed, False)):
            rows = np.flatnonzero(group & is_tried)
            if len(rows):
                found, is_closed = _draw_from_prefix(
                    take_rows(logits, rows), params.take(rows), size, is_top_p_alone, kernels
                )
                tokens[rows] = found
                is_drawn[rows] = is_closed.cpu().numpy()
    chosen = np.flatnonzero(~is_drawn)
    for chunk in _chunks(len(chosen), vocab_size):
        rows = chosen[chunk]
        tokens[rows] = _draw_from_all(take_rows(logits, rows), params.take(rows), kernels)
    return tokens


def _chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, CHUNK_SIZE // vocab_size)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def _draw_from_prefix(
    logits: Tensor,
    params: DrawParams,
    size: int,
    is_top_p_alone: bool,
    kernels: DrawKernels | None,
) -> tuple[Tensor, Tensor]:
    """Returns token ids [R], and whether the prefix, the `size` largest logits, holds all tokens
    that the rules keep, [R] bool.

    is_top_p_alone: top_p is a share of the probability of the whole vocabulary; otherwise, of the
    tokens that the other rules keep, all of which are in the prefix.
    """
    if kernels is None:
        values, ids = largest(logits, size)  # [R, K]
    else:
        values, ids = kernels.largest(logits, size)
    z = (values.float() - values[:, :1].float()) / _column(params.temperature, values)
    if is_top_p_alone:
        kept = z > -torch.inf
        weights = _weights(_prefix_probs(logits, ids, params, kernels))
        total = torch.full_like(weights[:, :1], UNITS)
        kept &= _kept_by_top_p(z, weights, total, params)
        is_closed = ~kept[:, -1]
    else:
        kept = _kept_before_top_p(z, params)
        is_closed = ~kept[:, -1]
        weights = _weights(z.softmax(dim=1)).masked_fill_(~kept, 0.0)
        kept &= _kept_by_top_p(z, weights, weights.sum(dim=1, keepdim=True), params)
    ids, order = ids.sort(dim=1)
    column = _invert(weights.masked_fill_(~kept, 0.0).gather(1, order), params.uniforms)
    return ids.gather(1, column)[:, 0], is_closed


def _prefix_probs(
    logits: Tensor, ids: Tensor, params: DrawParams, kernels: DrawKernels | None
) -> Tensor:
    """Returns the probabilities of the tokens `ids` [R, K] in the whole vocabulary, float32."""
    probs = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    for chunk in _chunks(*logits.shape):
        z = _tempered(logits[chunk], params.temperature[chunk], kernels)
        probs[chunk] = z.softmax(dim=1).gather(1, ids[chunk])
    return probs


def _tempered(
    logits: Tensor, temperature: NDArray[np.float32], kernels: DrawKernels | None
) -> Tensor:
    """Returns z of the whole vocabulary, [R, V] float32."""
    if kernels is not None:
        return kernels.temper(logits, torch.from_numpy(temperature))
    peaks = logits.amax(dim=1, keepdim=True).float()
    return (logits.float() - peaks).div_(_column(temperature, logits))


def _draw_from_all(logits: Tensor, params: DrawParams, kernels: DrawKernels | None) -> Tensor:
    """Returns token ids [R], drawn by any rules; sorts the whole vocabulary if there are rules."""
    z = _tempered(logits, params.temperature, kernels)
    probs = z.softmax(dim=1)
    if (params.top_k > 0).any() or (params.top_p < 1).any() or (params.min_p > 0).any():
        if kernels is None:
            z.masked_fill_(z < _cutoff(z, probs, params), -torch.inf)
        else:
            rules = (min_p_cutoff(params), params.top_k, params.top_p)
            kernels.cut(z, probs, *map(torch.from_numpy, rules))
        probs = z.softmax(dim=1)
    if kernels is not None:
        return kernels.invert(probs, torch.from_numpy(params.uniforms))
    return _invert_by_blocks(_weights(probs), params.uniforms)


def _cutoff(z: Tensor, probs: Tensor, params: DrawParams) -> Tensor:
    """Returns the smallest z of each row that the rules keep, [R, 1]."""
    descending = _descending(z)
    kept = _kept_before_top_p(descending, params)
    # A larger z has a larger probability, so both sort in the same order.
    weights = _weights(_descending(probs)).masked_fill_(~kept, 0.0)
    kept &= _kept_by_top_p(descending, weights, weights.sum(dim=1, keepdim=True), params)
    last = (kept.sum(dim=1, keepdim=True) - 1).clamp_(min=0)
    return descending.gather(1, last)


def _descending(z: Tensor) -> Tensor:
    """Sorts each row, largest first; on the host with numpy, whose sort is vectorised."""
    if z.device.type != "cpu":
        return z.sort(dim=1, descending=True).values
    return torch.from_numpy(np.sort(z.numpy(), axis=1)).flip(1)


def _kept_before_top_p(z: Tensor, params: DrawParams) -> Tensor:
    """Returns [R, K] bool: which of the descending values z [R, K] min_p and top_k keep; never a
    banned token."""
    size = z.shape[1]
    last = np.where(params.top_k == 0, size, np.minimum(params.top_k, size)) - 1
    kept = (z > -torch.inf) & (z >= _column(min_p_cutoff(params), z))
    kept &= z >= z.gather(1, _column(last, z))
    return kept


def min_p_cutoff(params: DrawParams) -> NDArray[np.float32]:
    """Returns the smallest z that min_p keeps, [R]; -inf when it is off."""
    with np.errstate(divide="ignore"):
        return np.log(params.min_p).astype(np.float32)


def _kept_by_top_p(z: Tensor, weights: Tensor, total: Tensor, params: DrawParams) -> Tensor:
    """Returns [R, K] bool: the shortest prefix with top_p of the mass `total` [R, 1], and all
    values equal to its last one."""
    before = weights.cumsum(dim=1) - weights  # mass of the larger values; exact
    count = (before < _column(params.top_p, weights) * total).sum(dim=1, keepdim=True)
    cutoff = z.gather(1, (count - 1).clamp_(min=0))
    return (z >= cutoff) | _column(params.top_p >= 1, z)


def _weights(probs: Tensor) -> Tensor:
    """Returns probabilities as whole multiples of 1 / UNITS, float64."""
    return (probs * UNITS).floor_().double()


def _invert(weights: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """Returns [R, 1]: the first column at which the running sum of `weights` [R, K] exceeds the
    uniform number's share of their sum."""
    sums = weights.cumsum(dim=1)
    target = (_column(uniforms, weights) * sums[:, -1:]).floor()  # always below the last sum
    return torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)


def _invert_by_blocks(weights: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """Returns [R], the columns of `_invert`: first among sums of blocks [R, B], then in a block."""
    num_rows, vocab_size = weights.shape
    weights = torch.nn.functional.pad(weights, (0, -vocab_size % WIDTH))
    sums = weights.view(num_rows, -1, WIDTH).sum(dim=2).cumsum(dim=1)
    target = (_column(uniforms, weights) * sums[:, -1:]).floor()
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    columns = block * WIDTH + torch.arange(WIDTH, device=weights.device)  # [R, W]
    inner = weights.gather(1, columns)
    start = sums.gather(1, block) - inner.sum(dim=1, keepdim=True)
    offset = torch.searchsorted(start + inner.cumsum(dim=1), target, right=True)
    return (block[:, 0] * WIDTH + offset[:, 0]).clamp_(max=vocab_size - 1)


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    """Copies [R] on the host to [R, 1] on the device of `like`."""
    return torch.from_numpy(values).to(like.device)[:, None]
