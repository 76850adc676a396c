"""Compares pixels of two processors that may order them differently: as pictures or as rows of
patches, line by line or in blocks of the patches that become one token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

CHANNELS = 3
MERGES = (1, 2, 3, 4)  # patches along a side of the block that becomes a token
STEPS = (1, 2)  # frames of a patch
NEAR = 0.02  # of values that are the others' times a factor, relative to their spread

Grid = tuple[int, int, int] | None


def difference(found: Tensor, expected: Tensor, grid: Grid, tolerance: float) -> str | None:
    """Describes how the values differ, whatever their order; None when they are equal.

    grid: the patches of `found` in (time or tiles, rows, columns), where it has one.
    """
    if any(_is_near(found, other, tolerance) for other in arrangements(expected, found, grid)):
        return None
    ours, theirs = (values.flatten().float().sort().values for values in (found, expected))
    if len(ours) != len(theirs):
        return (
            f"they have {len(ours):,} values of shape {tuple(found.shape)}, the reference has "
            f"{len(theirs):,} of shape {tuple(expected.shape)}: the size, the tiles or the frames "
            "are others"
        )
    most = float((ours - theirs).abs().max())
    if most <= tolerance:
        mirrored = _mirrored(found, expected, grid, tolerance)
        if mirrored is None and _has_the_patches(found, expected, grid, tolerance):
            return None  # where tiles of several sizes follow each other
        order = mirrored or "in an order that no model reads that the kit knows"
        return (
            f"they have the reference's values {order}; if this is meant, give them in this order "
            "in `make_reference`"
        )
    return f"they differ by up to {most:.3g}{_scaled(ours, theirs)}"


def _scaled(ours: Tensor, theirs: Tensor) -> str:
    """Says whether one is the other times a factor plus an offset."""
    spread = theirs.std()
    factor = float(ours.std() / spread)
    offset = float(ours.mean() - factor * theirs.mean())
    rest = float((ours - factor * theirs - offset).abs().mean() / ours.std())
    if rest < NEAR and (abs(factor - 1) > NEAR or abs(offset) > NEAR * float(ours.std())):
        return (
            f"; they are nearly the reference's times {factor:.3g} plus {offset:.3g}: rescale and "
            "normalise with the checkpoint's values, each channel with its own"
        )
    return "; resize as the reference does (filter, antialiasing, rounding, size)"


def _mirrored(found: Tensor, expected: Tensor, grid: Grid, tolerance: float) -> str | None:
    """Names a wrong order of the same values, where one is recognised."""
    if expected.dim() < 3:
        return None
    picture = expected.flatten(0, -4) if expected.dim() > 3 else expected[None]
    wrong = {
        "with channels in another order (BGR)": picture.flip(1),
        "mirrored": picture.flip(-1),
        "upside down": picture.flip(-2),
        "with rows and columns swapped": picture.transpose(-1, -2),
        "in another order of tiles": picture.flip(0),
    }
    for what, other in wrong.items():
        if other.equal(picture):
            continue
        shown = arrangements(other.contiguous(), found, grid)
        if any(_is_near(found, values, tolerance) for values in shown):
            return what
    return None


def _has_the_patches(found: Tensor, expected: Tensor, grid: Grid, tolerance: float) -> bool:
    """Whether both have the same patches, in any order."""
    ours = _sorted_rows(found)
    return any(
        _is_near(ours, _sorted_rows(other.reshape(found.shape)), tolerance)
        for other in arrangements(expected, found, grid)
        if other.numel() == found.numel()
    )


def _sorted_rows(rows: Tensor) -> Tensor:
    """Returns the rows in an order that depends on their values only."""
    rows = rows.float()
    weights = torch.linspace(1, 2, rows.shape[-1])
    return rows[(rows * weights).sum(-1).argsort()]


def _is_near(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if found.numel() != expected.numel():
        return False
    flat = expected.reshape(found.shape).float()
    return torch.allclose(found.float(), flat, rtol=0, atol=tolerance)


def arrangements(expected: Tensor, found: Tensor, grid: Grid) -> Iterator[Tensor]:
    """Yields the reference's pixels in the orders that `found` may have."""
    yield expected
    patch_dim = found.shape[-1]
    if expected.dim() >= 4 and found.dim() <= 3:
        yield from _of_pictures(expected.flatten(0, -4), patch_dim)
        yield from _of_a_strip(expected.flatten(0, -4), patch_dim)
    elif grid is not None:
        yield from _of_rows(expected.reshape(-1, expected.shape[-1]), grid, patch_dim)


def _of_pictures(pictures: Tensor, patch_dim: int) -> Iterator[Tensor]:
    """Yields rows of patches of pictures [N, C, H, W]."""
    num, channels, height, width = pictures.shape
    patch = math.isqrt(patch_dim // channels)
    if patch < 1 or patch**2 * channels != patch_dim or height % patch or width % patch:
        return
    rows, columns = height // patch, width // patch
    for merge in MERGES:
        if rows % merge or columns % merge:
            continue
        cells = pictures.view(
            num, channels, rows // merge, merge, patch, columns // merge, merge, patch
        )
        yield cells.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, patch_dim)
        yield cells.permute(0, 2, 5, 3, 6, 4, 7, 1).reshape(-1, patch_dim)


def _of_a_strip(pictures: Tensor, patch_dim: int) -> Iterator[Tensor]:
    """Yields the patches that lie side by side in strips [1, C, P, N * P]."""
    num, channels, patch, width = pictures.shape
    if num == 1 and channels * patch**2 == patch_dim and width % patch == 0:
        cells = pictures.view(channels, patch, width // patch, patch)
        yield cells.permute(2, 0, 1, 3).reshape(-1, patch_dim)


def _of_rows(rows: Tensor, grid: tuple[int, int, int], patch_dim: int) -> Iterator[Tensor]:
    """Yields rows of patches [N, D], which may come line by line and with padding at the end, in
    blocks, and with the values of a patch in another order."""
    steps, height, width = grid
    num = steps * height * width
    if len(rows) < num or rows.shape[-1] != patch_dim:
        return
    rows = rows[:num]
    for merge, frames in product(MERGES, STEPS):
        patch = math.isqrt(patch_dim // CHANNELS // frames)
        if height % merge or width % merge or patch**2 * CHANNELS * frames != patch_dim:
            continue
        cells = rows.view(steps, height // merge, merge, width // merge, merge, patch_dim)
        blocks = cells.permute(0, 1, 3, 2, 4, 5).reshape(num, patch_dim)
        yield blocks
        yield blocks.view(num, patch, patch, -1).permute(0, 3, 1, 2).reshape(num, patch_dim)
