"""The image processors: transformers' own, with one token for an image."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_processors.from_transformers import TransformersImages


class TowerImages(TransformersImages):
    """Images of one size. Raises CheckpointError where the processor's is not the tower's."""

    token = "<image>"
    markers = ("<image>",)
    is_whole_prompt = True
    auto_tokens = None  # an image has one token, whatever its size

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        self.check(checkpoint)

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns 1."""
        return 1

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError for images of another size than the tower's."""
        side = checkpoint.config.vision_config.image_size
        made = self.prepare(self.blank((8, 8)), self.settings)
        found = tuple(made.tensors["pixel_values"].shape[-2:])
        if found != (side, side):
            raise CheckpointError(
                f"the image processor makes images of {found[1]} x {found[0]} pixels, the vision "
                f"tower takes {side} x {side}; check preprocessor_config.json and "
                "mm_processor_kwargs"
            )


class FlexibleImages(TowerImages):
    """Images whose shape is kept, as rows of patches."""

    tensors = ("pixel_values", "spatial_shapes")

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises CheckpointError for patches of another size than the tower's."""
        side = checkpoint.config.vision_config.patch_size
        if self._fields["patch_size"] != side:
            raise CheckpointError(
                f"the image processor makes patches of {self._fields['patch_size']} pixels, the "
                f"vision tower takes {side}"
            )
