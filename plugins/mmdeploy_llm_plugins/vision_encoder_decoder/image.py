"""The image processor that a checkpoint names, with the size that its tower reads."""

from __future__ import annotations

from typing import Any

from mmdeploy_llm_processors.from_transformers import OneSizeImages

from .cells import num_cells, sides


class EncoderImages(OneSizeImages):
    """transformers' processor, with the size that the tower has positions for."""

    token = "<image>"
    markers = ("<image>",)

    def of_tower(self, config: Any) -> tuple[tuple[int, int], int]:
        """Returns the tower's size, and the length of its output."""
        return sides(config.encoder.image_size), num_cells(config.encoder)
