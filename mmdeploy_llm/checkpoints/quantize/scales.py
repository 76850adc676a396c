"""Rounds a window of layers: scales of columns (AWQ) first, then GPTQ and what refines it.

A column times s with its input divided by s is the same product, but is rounded as finely as s
makes it. Of a few powers of the inputs' size, the one whose rounded weight has the smallest error
of its outputs is taken. The second moments of the undivided inputs say all that is needed, so that
no further pass is made, and all powers are tried at once, as rows of one weight.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmdeploy_llm.checkpoints.saving.rounding import Rounded, Scheme, round_groups

from .folds import Fold, divided_norm
from .gptq import factor_of, output_error, refined, round_by_factor, values_of
from .sites import Site

POWERS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75)  # of the inputs' size; 0, no scales, is tried too
MIN_GAIN = 0.01  # scales must lower the error by this part
SAMPLE_ROWS = 256  # rows of a weight that are rounded to choose
LIMIT = 2.0**6  # of a scale, and of its inverse
Place = tuple[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A rounded window. sites: in the order of the sites. norms: new weights by parameter. error,
    nearest: of the outputs, and those of rounding to the nearest codes without scales."""

    sites: Sequence[Rounded]
    norms: Mapping[str, Tensor]
    error: float
    nearest: float


def round_window(
    sites: Sequence[Site],
    weights: Sequence[Tensor],
    moments: Sequence[Tensor],
    folds: Mapping[Place, Fold],
    norms: Mapping[str, Tensor],
) -> Window:
    """Rounds weights [n, k] float32 for inputs with these moments [k, k]. norms: the weights of the
    norms that `folds` names."""
    factors = [factor_of(own) for own in moments]
    columns = [torch.ones(site.k) for site in sites]
    rows = [torch.ones(len(weight)) for weight in weights]
    numbers = {(site.name, site.index): number for number, site in enumerate(sites)}
    divided: dict[str, Tensor] = {}
    for place, fold in folds.items():
        own = numbers[place]
        scales = best_scales(weights[own], moments[own], factors[own], sites[own].scheme, fold)
        if fold.norm is not None:
            divided[fold.norm], scales = divided_norm(
                norms[fold.norm], scales, is_centred=fold.is_centred
            )
        if fold.rows is not None:
            part = fold.row_scales(scales)
            rows[numbers[fold.rows]][fold.first_row : fold.first_row + len(part)] = 1 / part
        columns[own] = scales
    found, error, nearest = [], 0.0, 0.0
    for number, (site, weight) in enumerate(zip(sites, weights, strict=True)):
        column, row = columns[number], rows[number]
        scaled = weight * row[:, None]
        rounded = round_by_factor(scaled, factors[number], site.scheme, column)
        rounded = refined(scaled, rounded, moments[number], site.scheme, column)
        error += output_error(weight, rounded, moments[number], column, row)
        plain = round_groups(weight, site.scheme)
        nearest += output_error(weight, plain, moments[number])
        found.append(rounded)
    return Window(sites=found, norms=divided, error=error, nearest=nearest)


def best_scales(
    weight: Tensor, moments: Tensor, factor: Tensor, scheme: Scheme, fold: Fold
) -> Tensor:
    """Returns the scales [k] of the columns of `weight` [n, k] whose rounded weight, of a sample of
    the rows, changes the outputs least; ones if none is better than no scales."""
    sample = weight[:: -(-len(weight) // SAMPLE_ROWS)]
    power = fold.shared(moments.diagonal())
    if not bool((power > 0).any()):
        return torch.ones(weight.shape[1])
    size = power.clamp(min=1e-8 * float(power.max())).sqrt()
    tried = size ** torch.tensor((0.0, *POWERS))[:, None]
    tried = (tried / tried.log().mean(1, keepdim=True).exp()).clamp(1 / LIMIT, LIMIT)
    rows = sample.repeat(len(tried), 1)
    scales = tried.repeat_interleave(len(sample), 0)
    rounded = round_by_factor(rows, factor, scheme, scales)
    difference = values_of(rounded.codes, rounded.scales, rounded.zeros) / scales - rows
    squares = ((difference @ moments) * difference).view(len(tried), -1)
    errors = squares.sum(1, dtype=torch.float64)
    errors[0] *= 1 - MIN_GAIN
    return tried[errors.argmin()]
