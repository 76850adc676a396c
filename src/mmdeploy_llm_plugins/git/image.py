"""The image processor of GIT: CLIP's, with the size that its tower reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_processors.from_transformers import TransformersImages


def num_cells(vision: Any) -> int:
    """Returns the tokens of a picture: its patches, and one for its class."""
    count: int = (vision.image_size // vision.patch_size) ** 2 + 1
    return count


class GitImages(TransformersImages):
    """Raises, of each image, CheckpointError where the processor makes another size than the tower
    has positions for."""

    source = "CLIPImageProcessor"
    token = "<image>"
    markers = ("<image>",)
    auto_tokens = None  # every image has the same number

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._vision = checkpoint.config.vision_config
        super().__init__(checkpoint, options)

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the tokens of every picture."""
        found, side = tuple(made["pixel_values"].shape[-2:]), self._vision.image_size
        if found != (side, side):
            raise CheckpointError(
                f"the image processor makes pictures of {found[0]} x {found[1]} pixels, but the "
                f"tower reads {side} x {side} (image_size)"
            )
        return num_cells(self._vision)
