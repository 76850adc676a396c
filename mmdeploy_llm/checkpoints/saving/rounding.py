"""Rounds matrices to codes of few bits in plain torch, by the rule of CodedProducts.round_codes.

Shapes: n rows, k columns, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import Bits

RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
SEARCHED = (1.0, 0.92, 0.84, 0.76, 0.68)  # of each end of a range, where columns count differently
# Symmetric codes reach further on one side: by a wider range the other side's values fit too.
SYMMETRIC_RATIOS = (1.0, 8 / 7, 1.07, *RATIOS[1:])
MIN_GAIN = 1e-6  # a smaller range must be better by this part of the squared error
BLOCK_VALUES = 2**19  # values that are rounded at a time, each to several codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The way to round a matrix: bits of a code, and columns of a group, MAX_GROUP
    for whole rows. is_symmetric: the zero of
    each group is the middle code and is not stored; its scale may then be negative."""

    bits: Bits
    group_size: int
    is_symmetric: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounded:
    """A rounded matrix: weight = scale * (code - zero). codes: uint8 [n, k]. scales: bfloat16
    [n, G]. zeros: uint8 [n, G]. squared_error: relative, sum of (w' - w)^2 over sum of w^2."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    squared_error: float


def round_groups(weight: Tensor, scheme: Scheme) -> Rounded:
    """Rounds `weight` [n, k], finite floats of any dtype; groups divide k. In 4 bits each group's
    range is cut where that makes its squared error smaller."""
    n, k = weight.shape
    size = min(scheme.group_size, k)
    parts = [
        _round_block(block.float().view(-1, k // size, size), scheme)
        for block in torch.split(weight, max(1, BLOCK_VALUES // k))
    ]
    codes, scales, zeros, errors = (torch.cat(part) for part in zip(*parts, strict=True))
    total = float(sum(block.double().square().sum() for block in torch.split(weight, 256)))
    return Rounded(
        codes=codes.view(n, k),
        scales=scales,
        zeros=zeros,
        squared_error=float(errors.sum()) / total if total else 0.0,
    )


def _round_block(w: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rounds groups [n, G, size]: codes, scales, zeros and squared errors float64 [n, G]."""
    scales, zeros = best_ranges(w, scheme)
    codes, values = _round_range(w, scales, zeros, scheme.bits)
    errors = (values - w).square().sum(-1, dtype=torch.float64)
    return codes.to(torch.uint8), scales, zeros.to(torch.uint8), errors


def best_ranges(w: Tensor, scheme: Scheme, counts: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Returns the scales, bfloat16, and zeros, float, [n, G] of groups [n, G, size].

    counts: [G, size], or [n, G, size] where rows differ: how much the squared error of a column
    counts. Then each end of a range is cut by a part of its own, where zeros are not symmetric.
    """
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    scales, zeros = _ranges(low[..., None], high[..., None], scheme, searches=counts is not None)
    if scales.shape[-1] == 1:
        return scales[..., 0], zeros[..., 0]
    wide = w[..., None, :]
    _, values = _round_range(wide, scales, zeros, scheme.bits)
    squares = values.sub_(wide).square_()
    if counts is not None:
        squares *= counts[..., None, :]
    errors = squares.sum(-1)
    errors[..., 1:] *= 1 + MIN_GAIN
    best = errors.argmin(-1, keepdim=True)
    return scales.gather(-1, best)[..., 0], zeros.gather(-1, best)[..., 0]


def _ranges(low: Tensor, high: Tensor, scheme: Scheme, *, searches: bool) -> tuple[Tensor, Tensor]:
    """Returns the scales and zeros [n, G, C] that are tried for ranges low .. high [n, G, 1]; in 8
    bits the whole range only. searches: whether both ends are cut each by its own part."""
    bits = scheme.bits
    if scheme.is_symmetric:
        ratios = torch.tensor(SYMMETRIC_RATIOS if bits == 4 else SYMMETRIC_RATIOS[:1])
        return _symmetric_ranges(low, high, bits, ratios)
    if bits == 4 and searches:
        parts = torch.tensor(list(product(SEARCHED, SEARCHED)))
        return _own_ranges(low * parts[:, 0], high * parts[:, 1], bits)
    ratios = torch.tensor(RATIOS if bits == 4 else RATIOS[:1])
    return _own_ranges(low * ratios, high * ratios, bits)


def _own_ranges(low: Tensor, high: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Returns scales, bfloat16, and zeros for the ranges low .. high."""
    largest = 2**bits - 1
    scales = ((high - low) / largest).bfloat16()
    return scales, (-low * inverse_of(scales.float())).round().clamp(0, largest)


def _symmetric_ranges(
    low: Tensor, high: Tensor, bits: Bits, ratios: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the same for parts of the ranges, with the middle code as zero: the value that is
    farthest from 0 becomes code 0, which is farther from it than the largest code is."""
    middle = 2 ** (bits - 1)
    farthest = torch.where(high > -low, high, low)
    scales = (farthest * ratios / -middle).bfloat16()
    return scales, torch.full(scales.shape, float(middle))


def inverse_of(scales: Tensor) -> Tensor:
    """Returns 1 / scales; 0 where all values of a group are 0."""
    return torch.where(scales != 0, 1 / scales, 0)


def _round_range(w: Tensor, scales: Tensor, zeros: Tensor, bits: Bits) -> tuple[Tensor, Tensor]:
    """Returns the codes, float, and the values that they stand for, with these scales and zeros of
    the groups in the last dimension of `w`."""
    wide = scales.float()
    codes = (w * inverse_of(wide)[..., None]).round_().add_(zeros[..., None])
    codes = codes.clamp_(0, 2**bits - 1)
    return codes, (codes - zeros[..., None]).mul_(wide[..., None])


def relative_error(rounded: Tensor, weight: Tensor) -> float:
    """Returns the sum of (rounded - weight)^2 over the sum of weight^2."""
    total = float(weight.double().square().sum())
    return float((rounded.double() - weight.double()).square().sum()) / total if total else 0.0
