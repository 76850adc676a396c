"""The image processor of Llama 3.2 Vision: a picture on a canvas of up to four square tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mmdeploy_llm_processors.from_transformers import TransformersImages

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint

TOKEN = "<|image|>"


def tile_tokens(vision: Any) -> int:
    """Returns the tokens of a tile: its patches, and one for its class."""
    count: int = (vision.image_size // vision.patch_size) ** 2 + 1
    return count


class MllamaImages(TransformersImages):
    """transformers' processor. Every picture has the tokens of all tiles, since those beyond it are
    read, too. Raises CheckpointError where it makes other tiles than the tower reads."""

    source = "MllamaImageProcessor"
    token = TOKEN
    markers = (TOKEN,)
    tensors = ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")
    auto_tokens = None  # every image has the same number

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        vision, fields = checkpoint.config.vision_config, self._fields
        self._num_tokens: int = vision.max_num_tiles * tile_tokens(vision)
        found = fields["max_image_tiles"], fields["size"]["height"]
        needed = vision.max_num_tiles, vision.image_size
        if found != needed:
            raise CheckpointError(
                f"the image processor makes {found[0]} tiles of {found[1]} pixels "
                f"(max_image_tiles, size), but the tower reads {needed[0]} of {needed[1]} "
                "(max_num_tiles, image_size)"
            )

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the tokens of all tiles."""
        return self._num_tokens

    def text(self, size: Any, settings: Mapping[str, Any]) -> str:
        """Returns the text of an image, which is the same for all sizes."""
        return self.token * self._num_tokens
