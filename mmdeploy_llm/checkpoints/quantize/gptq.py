"""GPTQ (Frantar et al. 2022): rounds the columns of a weight in order, and spreads the error of
each over the columns that follow, so that the products with typical inputs change least.

Shapes: n rows (outputs), k columns (inputs), G groups of columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmdeploy_llm.checkpoints.saving.rounding import (
    Rounded,
    Scheme,
    inverse_of,
    relative_error,
    round_groups,
)
from mmdeploy_llm.errors import CheckpointError

DAMPING = (0.01, 0.1, 1.0)  # of the mean of the diagonal; a larger one where a factor fails


def round_by_factor(weight: Tensor, factor: Tensor, scheme: Scheme) -> Rounded:
    """Rounds `weight` [n, k] float32 with the factor [k, k] that `factor_of` gives. The scale and
    zero of a group are chosen when its first column is reached, for the values as they are then."""
    size, rest = min(scheme.group_size, weight.shape[1]), weight.clone()
    parts = []
    for start in range(0, weight.shape[1], size):
        columns = slice(start, start + size)
        group = round_groups(rest[:, columns], scheme)
        codes, errors = _round_columns(rest[:, columns], group, factor[columns, columns], scheme)
        rest[:, start + size :] -= errors @ factor[columns, start + size :]
        parts.append((codes, group.scales, group.zeros))
    codes, scales, zeros = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return Rounded(
        codes=codes,
        scales=scales,
        zeros=zeros,
        squared_error=relative_error(values_of(codes, scales, zeros), weight),
    )


def _round_columns(
    group: Tensor, ranges: Rounded, factor: Tensor, scheme: Scheme
) -> tuple[Tensor, Tensor]:
    """Rounds the columns of one group [n, size]; returns their codes, uint8, and their errors over
    the diagonal of `factor` [size, size]."""
    rest, (n, size) = group.T.contiguous(), group.shape
    codes, errors = torch.empty(size, n, dtype=torch.uint8), torch.empty(size, n)
    scale, zero = ranges.scales[:, 0].float(), ranges.zeros[:, 0].float()
    inverse = inverse_of(scale)
    for column in range(size):
        code = ((rest[column] * inverse).round_() + zero).clamp_(0, 2**scheme.bits - 1)
        # GPTQ: later columns make up for this error, in proportion to the row of the factor.
        error = (rest[column] - (code - zero) * scale) / factor[column, column]
        codes[column], errors[column] = code.to(torch.uint8), error
        rest[column + 1 :].addr_(factor[column, column + 1 :], error, alpha=-1)
    return codes.T, errors.T


def factor_of(moments: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped moments, [k, k]. For inputs
    that are divided by s [k], it is this factor with its columns times s. Raises CheckpointError
    for moments that are not finite."""
    diagonal = moments.diagonal()
    mean = diagonal.mean().clamp(min=1e-12)
    for damping in DAMPING:
        damped = moments.clone()
        damped.diagonal().add_(damping * mean)
        damped.diagonal()[diagonal == 0] = mean
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
    raise CheckpointError("inputs of a layer have values that are not finite; it cannot be rounded")


def values_of(codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """Returns the weight that codes [n, k], scales and zeros [n, G] stand for, float32."""
    size = codes.shape[1] // scales.shape[1]
    wide = (own.float().repeat_interleave(size, 1) for own in (scales, zeros))
    scale, zero = wide
    return (codes.float() - zero) * scale


def output_error(
    weight: Tensor,
    rounded: Rounded,
    moments: Tensor,
    columns: Tensor | float = 1.0,
    rows: Tensor | float = 1.0,
) -> float:
    """Returns the sum over outputs of the squared error of x @ weight.T for the inputs that
    `moments` sums up. columns [k], rows [n]: where `rounded` is a weight that was multiplied by
    these."""
    values = values_of(rounded.codes, rounded.scales, rounded.zeros)
    difference = values / columns / torch.as_tensor(rows)[..., None] - weight
    return float(((difference @ moments) * difference).sum(dtype=torch.float64))
