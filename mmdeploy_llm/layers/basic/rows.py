"""Splits the rows of a step into chunks, so that temporaries on the CPU stay small.

malloc maps a temporary of a few megabytes anew at every use, and touching its pages costs several
times the arithmetic; small ones are reused and stay in the CPU cache.
"""

from __future__ import annotations

from torch import Tensor

# Products are fastest on whole tiles of rows.
TILE = 64


def row_chunks(x: Tensor, row_size: int, max_values: int) -> list[slice]:
    """Splits the rows of `x` [T, ...] into slices of at most max_values // row_size rows, but at
    least one tile; one slice when `x` is not on the CPU."""
    num_rows = x.shape[0]
    step = max(TILE, max_values // row_size // TILE * TILE)
    if num_rows <= step or not x.is_cpu:
        return [slice(0, num_rows)]
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
