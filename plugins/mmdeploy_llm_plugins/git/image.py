"""The image processor of GIT: CLIP's, with the size that its tower reads."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm_processors.from_transformers import OneSizeImages


def num_cells(vision: Any) -> int:
    """Returns the tokens of a picture: its patches, and one for its class."""
    count: int = (vision.image_size // vision.patch_size) ** 2 + 1
    return count


class GitImages(OneSizeImages):
    """transformers' processor, with the size that the tower has positions for."""

    source = "CLIPImageProcessor"
    token = "<image>"
    markers = ("<image>",)

    def of_tower(self, config: Any) -> tuple[tuple[int, int], int]:
        """Returns the tower's square, and the tokens of a picture."""
        vision = config.vision_config
        return (vision.image_size, vision.image_size), num_cells(vision)
