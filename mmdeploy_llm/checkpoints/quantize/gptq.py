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
    best_ranges,
    inverse_of,
    relative_error,
)
from mmdeploy_llm.errors import CheckpointError

DAMPING = (0.01, 0.1, 1.0)  # of the mean of the diagonal; a larger one where a factor fails


def round_by_factor(
    weight: Tensor, factor: Tensor, scheme: Scheme, scales: Tensor | None = None
) -> Rounded:
    """Rounds `weight` [n, k] float32 times `scales`, [k] or [n, k], for inputs divided by these.

    factor: [k, k], of the undivided inputs, as `factor_of` gives it. The scale and zero of a group
    are chosen when its first column is reached, for the values as they are then, so that the
    errors that no later column makes up for are smallest.
    """
    size, rest = min(scheme.group_size, weight.shape[1]), weight.clone()
    scales = torch.ones(weight.shape[1]) if scales is None else scales
    left = factor.diagonal().reciprocal()  # the part of an error that stays
    parts = []
    for start in range(0, weight.shape[1], size):
        columns = slice(start, start + size)
        by = scales[..., columns]
        counts = (left[columns] / by).square().unsqueeze(-2)
        ranges = best_ranges((rest[:, columns] * by)[:, None], scheme, counts)
        codes, errors = _round_columns(
            rest[:, columns], by, ranges, factor[columns, columns], scheme
        )
        rest[:, start + size :] -= errors @ factor[columns, start + size :]
        parts.append((codes, ranges[0], ranges[1].to(torch.uint8)))
    codes, found, zeros = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    return Rounded(
        codes=codes,
        scales=found,
        zeros=zeros,
        squared_error=relative_error(values_of(codes, found, zeros), weight * scales),
    )


def _round_columns(
    group: Tensor,
    scales: Tensor,
    ranges: tuple[Tensor, Tensor],
    factor: Tensor,
    scheme: Scheme,
) -> tuple[Tensor, Tensor]:
    """Rounds the columns of one group [n, size], each times its scales; returns their codes, uint8,
    and their errors over the diagonal of `factor` [size, size]. ranges: scales and zeros [n, 1]."""
    rest, (n, size) = group.T.contiguous(), group.shape
    codes, errors = torch.empty(size, n, dtype=torch.uint8), torch.empty(size, n)
    scale, zero = ranges[0][:, 0].float(), ranges[1][:, 0]
    inverse = inverse_of(scale)
    by, highest = scales.movedim(-1, 0), 2**scheme.bits - 1
    for column in range(size):
        own = rest[column] * by[column]
        code = (own * inverse).round_().add_(zero).clamp_(0, highest)
        # GPTQ: later columns make up for this error, in proportion to the row of the factor.
        error = own.sub_((code - zero).mul_(scale)).div_(by[column] * factor[column, column])
        codes[column], errors[column] = code, error
        rest[column + 1 :].addr_(factor[column, column + 1 :], error, alpha=-1)
    return codes.T, errors.T


def factor_of(moments: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped moments, [k, k]. Raises
    CheckpointError for moments that are not finite."""
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
