"""GPTQ (Frantar et al. 2022): rounds the columns of a weight in order, and spreads the error of
each over the columns that follow, so that the products with typical inputs change least. Then one
code and one scale after the other moves to where that error is smallest (coordinate descent).

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
PASSES = 3  # over all codes and scales; two more lower the error by another 1 %


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
    for damping in DAMPING:
        lower, failed = torch.linalg.cholesky_ex(damped(moments, damping))
        if not failed:
            inverse = torch.cholesky_inverse(lower)
            upper: Tensor
            upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
            if not failed:
                return upper
    raise CheckpointError("inputs of a layer have values that are not finite; it cannot be rounded")


def damped(moments: Tensor, damping: float) -> Tensor:
    """Returns moments with a part of their mean added to the diagonal; inputs that are always 0 get
    the mean."""
    found, diagonal = moments.clone(), moments.diagonal()
    mean = diagonal.mean().clamp(min=1e-12)
    found.diagonal().add_(damping * mean)
    found.diagonal()[diagonal == 0] = mean
    return found


def refined(
    weight: Tensor, rounded: Rounded, moments: Tensor, scheme: Scheme, scales: Tensor | None = None
) -> Rounded:
    """Moves the codes and scales of `rounded`, which stands for `weight` [n, k] times `scales` [k],
    each to the best value while the others stay, PASSES times: the error of the outputs for inputs
    that `moments` [k, k] sums up never grows."""
    scales = torch.ones(weight.shape[1]) if scales is None else scales
    wanted, size = weight * scales, min(scheme.group_size, weight.shape[1])
    own = damped(moments, DAMPING[0]) / scales / scales[:, None]
    values = values_of(rounded.codes, rounded.scales, rounded.zeros)
    slope = (values - wanted) @ own  # half of the error's
    codes, found = rounded.codes.clone(), rounded.scales.clone()
    for _ in range(PASSES):
        for group, start in enumerate(range(0, weight.shape[1], size)):
            columns = slice(start, start + size)
            zero = rounded.zeros[:, group].float()
            levels = codes[:, columns].float() - zero[:, None]
            before = levels * found[:, group, None].float()
            found[:, group] = _move_group(
                levels, slope[:, columns], own[columns, columns], found[:, group], zero, scheme
            )
            codes[:, columns] = (levels + zero[:, None]).to(torch.uint8)
            slope += (levels * found[:, group, None].float() - before) @ own[columns]
    return Rounded(
        codes=codes,
        scales=found,
        zeros=rounded.zeros,
        squared_error=relative_error(values_of(codes, found, rounded.zeros), wanted),
    )


def _move_group(
    levels: Tensor, slope: Tensor, moments: Tensor, scale: Tensor, zero: Tensor, scheme: Scheme
) -> Tensor:
    """Moves the levels [n, size] of a group, codes without their zeros [n], in place; returns the
    scales for them, bfloat16 [n]. moments: [size, size]. slope: [n, size], half of the error's."""
    rest, wide, highest = slope.clone(), scale.float(), 2**scheme.bits - 1
    inverse = inverse_of(wide)
    for column in range(levels.shape[1]):
        level = levels[:, column]
        step = rest[:, column] * inverse / moments[column, column]
        new = torch.minimum(torch.maximum((level - step).round_(), -zero), highest - zero)
        rest.addr_((new - level) * wide, moments[column])
        levels[:, column] = new
    curve, slant = ((levels @ moments) * levels).sum(1), (rest * levels).sum(1)
    new_scale = (wide - slant * inverse_of(curve)).bfloat16()
    change = new_scale.float() - wide
    is_better = (change * (2 * slant + change * curve) < 0) & (new_scale * scale > 0)
    return torch.where(is_better, new_scale, scale)


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
