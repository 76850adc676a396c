"""Describes items of grid families whose embeddings are given by the caller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaInput

from .options import ImageOptions


def embedded_grid(
    kind: str,
    grid: tuple[int, int, int] | None,
    options: ImageOptions,
    merged_steps: int = 1,
) -> MediaInput:
    """Returns the item with a grid of patches (time, rows, columns) and its number of tokens.

    merged_steps: steps in time that become one token. Raises MediaError without a grid, and for one
    that cannot be merged.
    """
    merge = options.merge_size
    if grid is None:
        raise MediaError(
            f"{kind}_embeds of this model need a 'grid': patches in (time, rows, columns) before "
            "they are merged, as in transformers' image_grid_thw"
        )
    time, rows, columns = grid
    if time % merged_steps or rows % merge or columns % merge:
        raise MediaError(
            f"the grid {grid} of {kind}_embeds cannot be merged by {merged_steps} in time and by "
            f"{merge} in rows and columns; give the patches before they are merged"
        )
    if kind == "image" and time != 1:
        raise MediaError(f"the grid {grid} of image_embeds has {time} steps in time; allowed is 1")
    num_tokens = time // merged_steps * (rows // merge) * (columns // merge)
    return MediaInput(kind=kind, tensors={}, num_tokens=num_tokens, key="", grid_thw=grid)


def check_names(kind: str, given: Mapping[str, Any], *known: str) -> None:
    """Raises MediaError for names of options that items given as embeddings do not have."""
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        names = ", ".join(map(repr, (f"{kind}_embeds", "grid", *known)))
        raise MediaError(f"{kind}_embeds have an unknown option {unknown[0]!r}; known: {names}")
