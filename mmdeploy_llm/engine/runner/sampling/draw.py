"""Draws a token at random: min-p, top-k and top-p, mostly without sorting the vocabulary.

For one row, with z = (logit - largest logit) / temperature and a token's mass, the integer
floor(exp(z) * 2**42) that `masses` defines:

    min_p   keeps z >= log(min_p), that is p >= largest p * min_p
    top_k   keeps z >= the k-th largest z
    top_p   keeps z >= the z at which the mass of the largest reaches ceil(top_p * mass of the rest)

Every rule keeps all values from a cutoff upwards, so that equal logits are kept or dropped together
and no result depends on the order in which a sort leaves them. One uniform number then selects a
token by inverse CDF, in vocabulary order: the first at which the sum of masses exceeds
floor(uniform * all that is kept).

Sums of integers are exact in any order, so that any way to find a cutoff gives the same token, in
every batch: the CPU kernels sort nothing (kernels/cpp/sampling/draw.h). Here, a row is first drawn
from its 64 largest logits, from its 1,024 when top_k keeps more, and from the whole vocabulary when
these may not be all.

Shapes: R rows, V vocabulary, K prefix, B blocks, W width of a block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmdeploy_llm.kernels import TORCH, DrawRules, Kernels

from .largest import largest


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawParams:
    """The params of random draws, one value for each row: [R]. top_k 0, top_p 1 and min_p 0 switch
    the rule off.

    temperature > 0. uniforms: random numbers in [0, 1).
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    uniforms: NDArray[np.float64]

    def take(self, rows: NDArray[np.int64]) -> DrawParams:
        """Returns the params of some rows."""
        return DrawParams(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniforms=self.uniforms[rows],
        )


def take_rows(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Returns some rows of [R, V], in ascending order; without a copy when it is all of them."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.from_numpy(rows).to(logits.device)]


PREFIX_SIZES = (64, 1024)
CHUNK_SIZE = 2**19  # logits in one operation over whole rows, to bound temporaries
WIDTH = 64


def draw(logits: Tensor, params: DrawParams, kernels: Kernels = TORCH) -> Tensor:
    """Draws a token id for each row of logits [R, V], of any float dtype; [R] int64. Rows with NaN
    get an arbitrary id."""
    if kernels.can_draw(logits):
        return kernels.draw(logits, _rules(params))
    num_rows, vocab_size = logits.shape
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=logits.device)
    is_mixed = (params.top_k == 0) & (params.min_p == 0)  # no rule drops tokens before top_p
    has_no_rule = is_mixed & (params.top_p >= 1)
    is_drawn = np.zeros(num_rows, dtype=np.bool_)
    for size in (size for size in PREFIX_SIZES if size < vocab_size):
        # The prefix must hold the k-th value and one below it. Other rules keep either few tokens
        # or so many that a second prefix is wasted.
        is_tried = ~is_drawn & ~has_no_rule & (params.top_k < size)
        is_tried &= (params.top_k > 0) | (size == PREFIX_SIZES[0])
        for group, is_top_p_alone in ((is_mixed, True), (~is_mixed, False)):
            rows = np.flatnonzero(group & is_tried)
            if len(rows):
                found, is_closed = _draw_from_prefix(
                    take_rows(logits, rows), params.take(rows), size, is_top_p_alone
                )
                tokens[rows] = found
                is_drawn[rows] = is_closed.cpu().numpy()
    chosen = np.flatnonzero(~is_drawn)
    for chunk in _chunks(len(chosen), vocab_size):
        rows = chosen[chunk]
        tokens[rows] = _draw_from_all(take_rows(logits, rows), params.take(rows))
    return tokens


def _rules(params: DrawParams) -> DrawRules:
    return DrawRules(
        temperature=torch.from_numpy(params.temperature),
        least=torch.from_numpy(min_p_cutoff(params)),
        top_k=torch.from_numpy(params.top_k),
        top_p=torch.from_numpy(params.top_p),
        uniforms=torch.from_numpy(params.uniforms),
    )


def _chunks(num_rows: int, vocab_size: int) -> Iterator[slice]:
    step = max(1, CHUNK_SIZE // vocab_size)
    return (slice(first, first + step) for first in range(0, num_rows, step))


def _draw_from_prefix(
    logits: Tensor, params: DrawParams, size: int, is_top_p_alone: bool
) -> tuple[Tensor, Tensor]:
    """Returns token ids [R], and whether the prefix, the `size` largest logits, holds all tokens
    that the rules keep, [R] bool.

    is_top_p_alone: top_p is a share of the mass of the whole vocabulary; otherwise, of the tokens
    that the other rules keep, all of which are in the prefix.
    """
    values, ids = largest(logits, size)  # [R, K]
    z = (values.float() - values[:, :1].float()) / _column(params.temperature, values)
    weights = masses(z)
    if is_top_p_alone:
        kept = z > -torch.inf
        kept &= _kept_by_top_p(z, weights, _whole_mass(logits, params), params)
        is_closed = ~kept[:, -1]
    else:
        kept = _kept_before_top_p(z, params)
        is_closed = ~kept[:, -1]
        weights = weights.masked_fill_(~kept, 0)
        kept &= _kept_by_top_p(z, weights, weights.sum(dim=1, keepdim=True), params)
    ids, order = ids.sort(dim=1)
    column = _invert(weights.masked_fill_(~kept, 0).gather(1, order), params.uniforms)
    return ids.gather(1, column)[:, 0], is_closed


def _whole_mass(logits: Tensor, params: DrawParams) -> Tensor:
    """Returns the mass of the whole vocabulary, [R, 1]."""
    sums = torch.empty(len(logits), 1, dtype=torch.int64, device=logits.device)
    for chunk in _chunks(*logits.shape):
        z = _tempered(logits[chunk], params.temperature[chunk])
        sums[chunk] = masses(z).sum(dim=1, keepdim=True)
    return sums


def _tempered(logits: Tensor, temperature: NDArray[np.float32]) -> Tensor:
    """Returns z of the whole vocabulary, [R, V] float32."""
    peaks = logits.amax(dim=1, keepdim=True).float()
    return (logits.float() - peaks).div_(_column(temperature, logits))


def _draw_from_all(logits: Tensor, params: DrawParams) -> Tensor:
    """Returns token ids [R], drawn by any rules; sorts the whole vocabulary if there are rules."""
    z = _tempered(logits, params.temperature)
    weights = masses(z)
    if (params.top_k > 0).any() or (params.top_p < 1).any() or (params.min_p > 0).any():
        weights.masked_fill_(z < _cutoff(z, params), 0)
    return _invert_by_blocks(weights, params.uniforms)


def _cutoff(z: Tensor, params: DrawParams) -> Tensor:
    """Returns the smallest z of each row that the rules keep, [R, 1]."""
    descending = _descending(z)
    kept = _kept_before_top_p(descending, params)
    weights = masses(descending).masked_fill_(~kept, 0)
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
    goal = (_column(params.top_p, weights) * total.double()).ceil_().long().minimum(total)
    count = (before < goal).sum(dim=1, keepdim=True)
    cutoff = z.gather(1, (count - 1).clamp_(min=0))
    return (z >= cutoff) | _column(params.top_p >= 1, z)


def _invert(weights: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """Returns [R, 1]: the first column at which the running sum of `weights` [R, K] exceeds the
    uniform number's share of their sum."""
    sums = weights.cumsum(dim=1)
    target = _target(sums[:, -1:], uniforms)
    return torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)


def _invert_by_blocks(weights: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """Returns [R], the columns of `_invert`: first among sums of blocks [R, B], then in a block."""
    num_rows, vocab_size = weights.shape
    weights = torch.nn.functional.pad(weights, (0, -vocab_size % WIDTH))
    sums = weights.view(num_rows, -1, WIDTH).sum(dim=2).cumsum(dim=1)
    target = _target(sums[:, -1:], uniforms)
    block = torch.searchsorted(sums, target, right=True).clamp_(max=sums.shape[1] - 1)
    columns = block * WIDTH + torch.arange(WIDTH, device=weights.device)  # [R, W]
    inner = weights.gather(1, columns)
    start = sums.gather(1, block) - inner.sum(dim=1, keepdim=True)
    offset = torch.searchsorted(start + inner.cumsum(dim=1), target, right=True)
    return (block[:, 0] * WIDTH + offset[:, 0]).clamp_(max=vocab_size - 1)


def _target(total: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """Returns the uniform number's share of `total` [R, 1], always below it."""
    return (_column(uniforms, total) * total.double()).floor_().long().minimum(total - 1)


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    """Copies [R] on the host to [R, 1] on the device of `like`."""
    return torch.from_numpy(values).to(like.device)[:, None]


FAR = -30.0  # the mass of a z that is not above it is 0
UNIT_BITS = 42  # sums stay below 2**63 for vocabularies of less than 2**21
LOG2E = 1.44269504
LN2 = (0.693359375, -2.12194440e-4)  # together; a product of the first with an integer is exact
# Cephes' polynomial: (exp(r) - 1 - r) / r**2, the highest power first
FIRST, *REST = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
)


def masses(z: Tensor) -> Tensor:
    """Returns the masses of z <= 0, float32 of any shape, as int64; 0 for NaN."""
    x = torch.where(z > FAR, z, FAR)
    n = (x * LOG2E).round_()
    r = (x - n * LN2[0]) - n * LN2[1]
    y = torch.full_like(r, FIRST)
    for coefficient in REST:
        y = y.mul_(r).add_(coefficient)
    y = y.mul_(r).mul_(r).add_(r).add_(1.0)
    power = (n.to(torch.int32) + (127 + UNIT_BITS) << 23).view(torch.float32)
    return y.mul_(power).to(torch.int64)


GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns numbers in [0, 1), multiples of 2**-53, one for each pair; both arguments [N].

    splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): the
    seed is hashed once, so that neighbouring seeds start far apart; positions count from there.
    """
    states = first_states(seeds) + (positions + np.uint64(1)) * GOLDEN
    return (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def first_states(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the states from which positions count, [N], one for each seed [N]."""
    return _mix(seeds + GOLDEN)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies splitmix64's finaliser, a bijection of 64 bits; products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))
