"""The image processor of PP-FormulaNet, which is Nougat's with other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmdeploy_llm_processors.from_transformers import OneSizeImages

from mmdeploy_llm.hooks import Checkpoint

# transformers' defaults, for files that leave them out.
DEFAULTS = {
    "image_mean": [0.7931] * 3,
    "image_std": [0.1738] * 3,
    "size": {"height": 768, "width": 768},
}


def num_cells(vision: Any) -> int:
    """Returns the cells of a picture: of its patches, after two convolutions of stride 2."""
    side = -(-(vision.image_size // vision.patch_size) // 2)
    count: int = (-(-side // 2)) ** 2
    return count


class FormulaImages(OneSizeImages):
    """transformers' processor, with the size that the tower has positions for."""

    source = "NougatImageProcessor"
    token = "<image>"
    markers = ("<image>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        own = {**DEFAULTS, **checkpoint.preprocessor}
        super().__init__(replace(checkpoint, preprocessor=own), options)

    def of_tower(self, config: Any) -> tuple[tuple[int, int], int]:
        """Returns the tower's square, and the cells of a picture."""
        vision = config.vision_config
        return (vision.image_size, vision.image_size), num_cells(vision)
