"""Rounds matrices to codes of few bits in plain torch, by the rule of CodedProducts.round_codes.

Shapes: n rows, k columns, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.kernels.coded import Bits

RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)
# Symmetric codes reach further on one side: by a wider range the other side's values fit too.
SYMMETRIC_RATIOS = (1.0, 8 / 7, 1.07, *RATIOS[1:])
MIN_GAIN = 1e-6  # a smaller range must be better by this part of the squared error
BLOCK_VALUES = 2**22  # values that are rounded at a time


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
    low, high = w.amin(-1).clamp(max=0), w.amax(-1).clamp(min=0)
    ratios, range_of = (
        (SYMMETRIC_RATIOS, _symmetric_range) if scheme.is_symmetric else (RATIOS, _own_range)
    )
    best = _round_range(w, *range_of(low, high, scheme.bits, 1.0), scheme.bits)
    for ratio in ratios[1:] if scheme.bits == 4 else ():
        found = _round_range(w, *range_of(low, high, scheme.bits, ratio), scheme.bits)
        is_better = found[3] < best[3] * (1 - MIN_GAIN)
        codes = torch.where(is_better[..., None], found[0], best[0])
        scales, zeros, errors = (
            torch.where(is_better, new, old) for new, old in zip(found[1:], best[1:], strict=True)
        )
        best = codes, scales, zeros, errors
    return best


def _own_range(low: Tensor, high: Tensor, bits: Bits, ratio: float) -> tuple[Tensor, Tensor]:
    """Returns scales, bfloat16, and zeros for the part `ratio` of the ranges low .. high [n, G]."""
    largest = 2**bits - 1
    scales = ((high - low) * ratio / largest).bfloat16()
    return scales, (-low * ratio * inverse_of(scales.float())).round().clamp(0, largest)


def _symmetric_range(low: Tensor, high: Tensor, bits: Bits, ratio: float) -> tuple[Tensor, Tensor]:
    """Returns the same with the middle code as zero: the value that is farthest from 0 becomes code
    0, which is farther from it than the largest code is."""
    middle = 2 ** (bits - 1)
    farthest = torch.where(high > -low, high, low)
    scales = (farthest * ratio / -middle).bfloat16()
    return scales, torch.full_like(low, middle)


def inverse_of(scales: Tensor) -> Tensor:
    """Returns 1 / scales; 0 where all values of a group are 0."""
    return torch.where(scales != 0, 1 / scales, 0)


def _round_range(
    w: Tensor, scales: Tensor, zeros: Tensor, bits: Bits
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rounds groups with these scales and zeros [n, G]."""
    wide = scales.float()
    steps = (w * inverse_of(wide)[..., None]).round()
    codes = (steps + zeros[..., None]).clamp(0, 2**bits - 1)
    values = (codes - zeros[..., None]) * wide[..., None]
    errors = (values - w).double().square().sum(-1)
    return codes.to(torch.uint8), scales, zeros.to(torch.uint8), errors


def relative_error(rounded: Tensor, weight: Tensor) -> float:
    """Returns the sum of (rounded - weight)^2 over the sum of weight^2."""
    total = float(weight.double().square().sum())
    return float((rounded.double() - weight.double()).square().sum()) / total if total else 0.0
