"""The random choice of a token: min-p, top-k and top-p without sorting the vocabulary.

For one row, with z = (logit - largest logit) / temperature:

    min_p   keeps z >= log(min_p), that is p >= largest p * min_p
    top_k   keeps z >= the k-th largest z
    top_p   keeps z >= the z at which the mass of larger ones first reaches top_p of the kept mass

Every rule keeps all values above a cut, so that equal logits are kept or dropped together and no
result depends on the order in which a sort leaves them.

Rows are first tried on their 64 largest logits; a row that may keep more goes on to a longer
prefix, in the end to the whole vocabulary. The ladder of a row depends on that row alone, softmax
works row by row, and masses are whole multiples of 2**-50, whose sums are exact in any order: the
same row gives the same token in every batch.

Shapes: R rows, V vocabulary, K prefix, B blocks, W width of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .largest import largest

UNITS = 2.0**50  # of probability; sums stay below 2**53, where float64 is exact
PREFIX_SIZES = (64, 1024, 16384)
OPEN_CHUNK = 4  # rows drawn at once from the whole vocabulary: bounds float64 temporaries
OPEN_WIDTH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawParams:
    """How to draw, row by row, all [R]. top_k 0, top_p 1 and min_p 0 are off.

    temperature > 0. uniforms: random numbers in [0, 1).
    """

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    uniforms: NDArray[np.float64]

    def take(self, rows: NDArray[np.int64]) -> DrawParams:
        """The params of some rows."""
        return DrawParams(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            uniforms=self.uniforms[rows],
        )


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """A token id for each row of [R, V]; [R] int64. Rows that hold NaN give any id."""
    tokens = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    is_open = (params.top_k == 0) & (params.top_p >= 1) & (params.min_p == 0)
    for first in range(0, int(is_open.sum()), OPEN_CHUNK):
        rows = np.flatnonzero(is_open)[first : first + OPEN_CHUNK]
        tokens[rows] = _draw_open(take_rows(logits, rows), params.take(rows))
    needs_rest = (params.top_k == 0) & (params.min_p == 0) & ~is_open
    for group, is_whole in ((needs_rest, True), (~needs_rest & ~is_open, False)):
        _climb(logits, params, np.flatnonzero(group), tokens, is_whole)
    return tokens


def take_rows(logits: Tensor, rows: NDArray[np.int64]) -> Tensor:
    """Some rows of [R, V]; without a copy when it is all of them, in order."""
    if len(rows) == logits.shape[0]:
        return logits
    return logits[torch.from_numpy(rows).to(logits.device)]


def _climb(
    logits: Tensor,
    params: DrawParams,
    rows: NDArray[np.int64],
    tokens: Tensor,
    needs_rest: bool,
) -> None:
    """Draws for `rows` into `tokens`, on prefixes that grow until each row's is long enough."""
    sizes = prefix_sizes(logits.shape[1])
    # The k-th value and at least one below it must be in the prefix.
    stages = np.searchsorted(np.array(sizes), np.minimum(params.top_k + 1, sizes[-1]))
    for stage, size in enumerate(sizes):
        now = rows[stages[rows] <= stage]
        if not len(now):
            continue
        found, is_closed = _draw_from_prefix(
            take_rows(logits, now), params.take(now), size, needs_rest
        )
        tokens[now] = found
        open_rows = now[~is_closed.cpu().numpy()]
        rows = np.concatenate([open_rows, rows[stages[rows] > stage]])


def prefix_sizes(vocab_size: int) -> Sequence[int]:
    """The lengths to try, the whole vocabulary last."""
    return *(size for size in PREFIX_SIZES if size < vocab_size), vocab_size


def _draw_from_prefix(
    logits: Tensor, params: DrawParams, size: int, needs_rest: bool
) -> tuple[Tensor, Tensor]:
    """Token ids [R], and whether the prefix held everything that a rule may keep [R] bool.

    needs_rest: only top_p is on, whose mass is measured against the whole vocabulary; otherwise an
    earlier rule has dropped all that is outside the prefix.
    """
    values, ids = largest(logits, size)  # [R, K]
    temperature = _column(params.temperature, logits)
    z = (values.float() - values[:, :1].float()) / temperature
    kept = _kept_before_top_p(z, params)
    if needs_rest:
        whole = (logits.float() - values[:, :1].float()).div_(temperature).softmax(dim=1)
        weights = (whole.gather(1, ids) * UNITS).floor().double()
        total = torch.full_like(weights[:, :1], UNITS)
    else:
        weights = (z.softmax(dim=1) * UNITS).floor().double().masked_fill(~kept, 0.0)
        total = weights.sum(dim=1, keepdim=True)
        is_closed = ~kept[:, -1]
    kept &= _kept_by_top_p(z, weights, total, params)
    if needs_rest:
        is_closed = ~kept[:, -1]
    if size == logits.shape[1]:
        is_closed = torch.ones_like(is_closed)
    return _pick(ids, weights.masked_fill(~kept, 0.0), params), is_closed


def _kept_before_top_p(z: Tensor, params: DrawParams) -> Tensor:
    """[R, K] bool: what min_p and top_k leave of the falling values z [R, K]; never a banned
    token."""
    with np.errstate(divide="ignore"):
        cut = _column(np.log(params.min_p).astype(np.float32), z)  # -inf when off
    kept = (z > -torch.inf) & (z >= cut)
    size = z.shape[1]
    top_k = np.where(params.top_k == 0, size, np.minimum(params.top_k, size))
    last = _column(top_k - 1, z)
    kept &= z >= z.gather(1, last)
    return kept


def _kept_by_top_p(z: Tensor, weights: Tensor, total: Tensor, params: DrawParams) -> Tensor:
    """[R, K] bool: the shortest prefix with top_p of the mass `total`, and what ties with its
    end."""
    before = weights.cumsum(dim=1) - weights  # mass of what comes first; exact
    wanted = _column(params.top_p, weights) * total
    is_off = _column(params.top_p >= 1, weights)
    count = (before < wanted).sum(dim=1, keepdim=True)
    cut = z.gather(1, (count - 1).clamp_(min=0))
    return (z >= cut) | is_off


def _pick(ids: Tensor, weights: Tensor, params: DrawParams) -> Tensor:
    """Inverse CDF in vocabulary order over weighted candidates, both [R, K]."""
    ids, order = ids.sort(dim=1)
    return ids.gather(1, _invert(weights.gather(1, order), params.uniforms))[:, 0]


def _invert(weights: Tensor, uniforms: NDArray[np.float64]) -> Tensor:
    """[R, 1]: the first place at which the running sum of `weights` [R, K] passes the uniform."""
    sums = weights.cumsum(dim=1)
    target = (_column(uniforms, weights) * sums[:, -1:]).floor()  # always below the last sum
    return torch.searchsorted(sums, target, right=True).clamp_(max=weights.shape[1] - 1)


def _draw_open(logits: Tensor, params: DrawParams) -> Tensor:
    """Token ids [R] with no rule on: inverse CDF over the whole vocabulary, first by blocks."""
    num_rows, vocab_size = logits.shape
    peaks = logits.amax(dim=1, keepdim=True).float()
    z = (logits.float() - peaks).div_(_column(params.temperature, logits))
    weights = z.softmax(dim=1).mul_(UNITS).floor_()
    num_blocks = -(-vocab_size // OPEN_WIDTH)
    padded = torch.zeros(
        num_rows, num_blocks * OPEN_WIDTH, dtype=torch.float64, device=logits.device
    )
    padded[:, :vocab_size] = weights
    blocks = padded.unflatten(1, (num_blocks, OPEN_WIDTH))  # [R, B, W]
    sums = blocks.sum(dim=2).cumsum(dim=1)  # [R, B]
    target = (_column(params.uniforms, logits) * sums[:, -1:]).floor()
    block = torch.searchsorted(sums, target, right=True).clamp_(max=num_blocks - 1)
    columns = block * OPEN_WIDTH + torch.arange(OPEN_WIDTH, device=logits.device)
    inner = padded.gather(1, columns)
    start = sums.gather(1, block) - inner.sum(dim=1, keepdim=True)
    place = torch.searchsorted(start + inner.cumsum(dim=1), target, right=True)
    return columns.gather(1, place.clamp_(max=OPEN_WIDTH - 1))[:, 0].clamp_(max=vocab_size - 1)


def _column(values: NDArray[np.generic], like: Tensor) -> Tensor:
    """[R] on the host as [R, 1] on the device of `like`."""
    return torch.from_numpy(values).to(like.device)[:, None]
