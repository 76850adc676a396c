"""Builds the largest item of a processor, with blank pixels. An engine that starts on a GPU encodes
it to measure the memory that this takes."""

from __future__ import annotations

import torch

from mmdeploy_llm.hooks import MediaInput

from .options import ImageOptions


def blank(
    kind: str,
    height: int,
    width: int,
    options: ImageOptions,
    max_tokens: int,
    *,
    num_steps: int = 1,
    grid_per_step: int = 1,
) -> MediaInput:
    """Builds an item of frames of this size with at most max_tokens tokens.

    num_steps: tokens along time. grid_per_step: patches along time that become one token.
    """
    factor, merge = options.factor, options.merge_size
    columns = min(width // factor, max_tokens)
    rows = min(height // factor, max_tokens // columns)
    num_steps = min(num_steps, max_tokens // (rows * columns))
    grid = (num_steps * grid_per_step, rows * merge, columns * merge)
    patch_dim = 3 * options.temporal_patch_size * options.patch_size**2
    return MediaInput(
        kind=kind,
        tensors={"pixels": torch.zeros(grid[0] * grid[1] * grid[2], patch_dim)},
        num_tokens=num_steps * rows * columns,
        key=f"largest-{kind}",
        grid_thw=grid,
    )
