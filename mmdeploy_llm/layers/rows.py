"""Cuts the rows of a step into parts, so that temporaries on the CPU stay small.

A temporary of a few megabytes is mapped anew by malloc at every use, and touching it costs several
times the arithmetic; small ones stay in the cache and are reused.
"""

from __future__ import annotations

from torch import Tensor

# Kernels are fastest on whole tiles of rows.
TILE = 64


def row_parts(x: Tensor, row_size: int, max_values: int) -> list[slice]:
    """Slices of the rows of `x` [T, ...] with at most `max_values` values of `row_size` per row
    each, but at least one tile; a single one when `x` is not on the CPU."""
    num_rows = x.shape[0]
    step = max(TILE, max_values // row_size // TILE * TILE)
    if num_rows <= step or not x.is_cpu:
        return [slice(0, num_rows)]
    return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
