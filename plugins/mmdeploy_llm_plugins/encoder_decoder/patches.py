"""How pictures of any shape become patches in Pix2Struct and Kosmos-2.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.errors import MediaError


def grid(fields: Mapping[str, Any], size: tuple[int, int]) -> tuple[int, int]:
    """Returns the rows and columns of patches of an image of (width, height), as transformers
    computes them. fields: of its processor."""
    most, patch = fields["max_patches"], fields["patch_size"]
    (width, height), down, across = size, patch["height"], patch["width"]
    scale = (most * (down / height) * (across / width)) ** 0.5
    rows = max(min(int(scale * height / down), most), 1)
    columns = max(min(int(scale * width / across), most), 1)
    return rows, columns


def check_grid(rows: int, columns: int, most: int | None) -> None:
    """Raises MediaError for an image with a row or column for which the model has no embedding.
    most: rows of its table, the first of which is of no patch."""
    if most is not None and max(rows, columns) >= most:
        raise MediaError(
            f"the image becomes {rows} x {columns} patches, but the model knows {most - 1} rows "
            "and columns: crop or pad the image, or lower max_patches in mm_processor_kwargs"
        )
