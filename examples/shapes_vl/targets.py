"""What the tokens of a row should know of its scene, for the losses in guide.py: what an image
token shows, and which shapes a text names."""

from __future__ import annotations

import re

import clips
import numpy as np
from pixels import MERGE
from scenes import COLOURS, KINDS, MAX_SHAPES, ROWS, SIZES, Scene, Shape

IGNORE = -100
# The classes of an image token (see cell_targets) and of a shape that a text names.
CELL_CLASSES = (tuple(COLOURS), KINDS, SIZES)
PLACES = 8
MENTION_CLASSES = (MAX_SHAPES + 1, len(COLOURS), len(KINDS), len(SIZES), len(ROWS), PLACES)
_SIZE, _COLOUR, _KIND = ("|".join(words) for words in (SIZES, COLOURS, KINDS))
MENTION = re.compile(
    rf"\b(?:({_SIZE}) )?(?:(?:({_COLOUR}) )?({_KIND})(?:e?s)?|({_COLOUR})(?: shapes?| one)?)\b"
)


def cell_targets(scene: Scene, grid: tuple[int, int, int], with_places: bool = True) -> np.ndarray:
    """Return what each image token shows: int64 [tokens, 5].

    Columns: colour, kind and size (0 is background); row and column of the shape (IGNORE for
    background).
    """
    rows, cols = grid[1] // MERGE, grid[2] // MERGE
    targets = np.zeros((rows, cols, len(CELL_CLASSES) + 2), np.int64)
    targets[..., -2:] = IGNORE
    ys, xs = np.mgrid[0:rows, 0:cols] + 0.5
    for shape in scene.shapes:
        x, y = shape.x / scene.width * cols, shape.y / scene.height * rows
        reach_x, reach_y = shape.radius / scene.width * cols, shape.radius / scene.height * rows
        inside = np.hypot((xs - x) / reach_x, (ys - y) / reach_y) < 0.8
        inside[min(int(y), rows - 1), min(int(x), cols - 1)] = True
        words = (shape.colour, shape.kind, shape.size)
        targets[inside] = [
            *(1 + names.index(word) for names, word in zip(CELL_CLASSES, words, strict=True)),
            *(place_of(scene, shape) if with_places else (IGNORE, IGNORE)),
        ]
    return targets.reshape(rows * cols, -1)


def clip_cells(clip: clips.Clip, shapes: list[Shape], grid: tuple[int, int, int]) -> np.ndarray:
    """Return cell_targets for a pair of frames: a cell shows the shape if either frame does."""
    parts = [
        cell_targets(Scene(width=clip.width, height=clip.height, shapes=(shape,)), grid, False)
        for shape in shapes
    ]
    return np.where(parts[0][:, :1] > 0, parts[0], parts[-1])


def place_of(scene: Scene, shape: Shape) -> tuple[int, int]:
    """Return the row of a shape, and its column from left (0) to right (PLACES - 1)."""
    return ROWS.index(shape.row), min(PLACES - 1, int(PLACES * shape.x / scene.width))


def mention_targets(scene: Scene, words: tuple[str | None, ...]) -> tuple[int, ...]:
    """Return what a text that names `words` (size, colour, kind) says about the scene.

    How many shapes match; if only one does, its colour, kind, size, row and column, else IGNORE.
    """
    fits = [
        shape
        for shape in scene.shapes
        if all(
            word in (None, given)
            for word, given in zip(words, (shape.size, shape.colour, shape.kind), strict=True)
        )
    ]
    if len(fits) != 1:
        return (len(fits), *[IGNORE] * (len(MENTION_CLASSES) - 1))
    words_of = (fits[0].colour, fits[0].kind, fits[0].size)
    named = [names.index(word) for names, word in zip(CELL_CLASSES, words_of, strict=True)]
    return (1, *named, *place_of(scene, fits[0]))
