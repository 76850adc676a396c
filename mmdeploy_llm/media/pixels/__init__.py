"""Turns RGB images into arrays, patches and tiles. Processors import these names from
mmdeploy_llm.media."""

from .draft import resize_draft
from .patches import (
    CLIP_MEAN,
    CLIP_STD,
    Patchifier,
    PatchOptions,
    normalise,
    patchify,
    resize,
    to_array,
)
from .tiles import tile_grid, tiles

__all__ = [
    "CLIP_MEAN",
    "CLIP_STD",
    "PatchOptions",
    "Patchifier",
    "normalise",
    "patchify",
    "resize",
    "resize_draft",
    "tile_grid",
    "tiles",
    "to_array",
]
