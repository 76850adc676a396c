"""The image processor that a checkpoint names, with the size that its tower reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_processors.from_transformers import TransformersImages

from .cells import num_cells, sides


class PictureProcessor(TransformersImages):
    """Raises, of each image, CheckpointError where the processor makes another size than the tower
    has positions for."""

    token = "<image>"
    markers = ("<image>",)
    auto_tokens = None  # every image has the same number

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._tower = checkpoint.config.encoder
        super().__init__(checkpoint, options)

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the length of the tower's output."""
        found, needed = tuple(made["pixel_values"].shape[-2:]), sides(self._tower.image_size)
        if found != needed:
            raise CheckpointError(
                f"the image processor makes pictures of {found[0]} x {found[1]} pixels, but the "
                f"tower reads {needed[0]} x {needed[1]} (image_size)"
            )
        return num_cells(self._tower)
