"""The image processor of BLIP, which makes all pictures squares of one size."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm_processors.from_transformers import OneSizeImages


def num_cells(vision: Any) -> int:
    """Returns the length of the tower's output: its patches, and a token before them."""
    return int(vision.image_size // vision.patch_size) ** 2 + 1


class BlipImages(OneSizeImages):
    """transformers' processor, with the size that the tower has positions for."""

    source = "BlipImageProcessor"
    token = "<image>"
    markers = ("<image>",)

    def of_tower(self, config: Any) -> tuple[tuple[int, int], int]:
        """Returns the tower's square, and the length of its output."""
        vision = config.vision_config
        return (vision.image_size, vision.image_size), num_cells(vision)
