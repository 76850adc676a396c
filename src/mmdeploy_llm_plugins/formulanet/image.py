"""The image processor of PP-FormulaNet, which is Nougat's with other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_processors.from_transformers import TransformersImages

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


class FormulaImages(TransformersImages):
    """Raises CheckpointError where the processor makes another size than the tower has positions
    for."""

    source = "NougatImageProcessor"
    token = "<image>"
    markers = ("<image>",)
    auto_tokens = None  # every image has the same number

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        own = {**DEFAULTS, **checkpoint.preprocessor}
        super().__init__(replace(checkpoint, preprocessor=own), options)
        vision = checkpoint.config.vision_config
        size, side = self._fields["size"], vision.image_size
        if (size["height"], size["width"]) != (side, side):
            raise CheckpointError(
                f"the image processor makes pictures of {size['height']} x {size['width']} pixels, "
                f"but the tower reads {side} x {side} (image_size)"
            )
        self._num_tokens = num_cells(vision)

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the cells of a picture."""
        return self._num_tokens

    def text(self, size: Any, settings: Mapping[str, Any]) -> str:
        """Returns the text of an image, which is the same for all sizes."""
        return self.token * self._num_tokens
