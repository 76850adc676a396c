"""The image processor of BLIP, which makes all pictures squares of one size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_processors.from_transformers import TransformersImages


def num_cells(vision: Any) -> int:
    """Returns the length of the tower's output: its patches, and a token before them."""
    return int(vision.image_size // vision.patch_size) ** 2 + 1


class BlipImages(TransformersImages):
    """Raises CheckpointError where the processor makes another size than the tower has positions
    for."""

    source = "BlipImageProcessor"
    token = "<image>"
    markers = ("<image>",)
    auto_tokens = None  # every image has the same number

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        vision = checkpoint.config.vision_config
        size, side = self._fields["size"], vision.image_size
        if (size["height"], size["width"]) != (side, side):
            raise CheckpointError(
                f"the image processor makes pictures of {size['height']} x {size['width']} pixels, "
                f"but the tower reads {side} x {side} (image_size)"
            )
        self._num_tokens = num_cells(vision)

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the length of the tower's output."""
        return self._num_tokens

    def text(self, size: Any, settings: Mapping[str, Any]) -> str:
        """Returns the text of an image, which is the same for all sizes."""
        return self.token * self._num_tokens
