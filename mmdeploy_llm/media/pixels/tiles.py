"""Dynamic tiling: an image is resized to a grid of square tiles with nearly its aspect, and a
thumbnail of the whole follows the tiles.

+-----+-----+-----+
|  0  |  1  |  2  |      +-----+
+-----+-----+-----+  and |  6  |  the thumbnail, unless there is only one tile
|  3  |  4  |  5  |      +-----+
+-----+-----+-----+
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
from PIL import Image

from .patches import BICUBIC, resize


def tile_grid(
    size: tuple[int, int], side: int, *, min_tiles: int = 1, max_tiles: int
) -> tuple[int, int]:
    """Returns the columns and rows of tiles whose aspect is closest to that of an image of `size`,
    (width, height). Of several with the same aspect, the largest whose area is below twice the
    image's.

    side: pixels of a tile. min_tiles, max_tiles: bounds of columns * rows, at most 1024.
    """
    width, height = size
    aspect, area = width / height, width * height
    best, smallest = (1, 1), float("inf")
    for columns, rows in _grids(min_tiles, max_tiles):
        difference = abs(aspect - columns / rows)
        is_filled = area > 0.5 * side**2 * columns * rows
        if difference < smallest or (difference == smallest and is_filled):
            best, smallest = (columns, rows), difference
    return best


def tiles(
    image: Image.Image,
    grid: tuple[int, int],
    side: int,
    *,
    resample: int = BICUBIC,
    has_thumbnail: bool = True,
) -> Iterator[np.ndarray]:
    """Yields the tiles of an RGB image that is resized to a grid of (columns, rows), each uint8
    [side, side, 3]: line by line, then the whole image as a thumbnail if there are several."""
    columns, rows = grid
    whole = resize(image, side * rows, side * columns, resample)
    for row in range(rows):
        for column in range(columns):
            top, left = side * row, side * column
            yield np.ascontiguousarray(whole[top : top + side, left : left + side])
    if has_thumbnail and columns * rows > 1:
        yield resize(image, side, side, resample)


@cache
def _grids(min_tiles: int, max_tiles: int) -> tuple[tuple[int, int], ...]:
    """Returns all grids of tiles, (columns, rows), smaller ones first."""
    numbers = range(1, max_tiles + 1)
    found = ((x, y) for x in numbers for y in range(1, max_tiles // x + 1) if x * y >= min_tiles)
    return tuple(sorted(found, key=lambda grid: grid[0] * grid[1]))
