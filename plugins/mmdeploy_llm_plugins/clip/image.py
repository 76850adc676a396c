"""The image processors: transformers' own, with one token for an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from mmdeploy_llm_processors.from_transformers import OneSizeImages, TransformersImages

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint

# What TIPSv2's class has where preprocessor_config.json says nothing; 2 is bilinear.
TIPS_FIELDS = {"size": {"height": 448, "width": 448}, "resample": 2, "do_normalize": False}


class TowerImages(OneSizeImages):
    """Images of one size."""

    token = "<image>"
    markers = ("<image>",)
    is_whole_prompt = True

    def of_tower(self, config: Any) -> tuple[tuple[int, int], int]:
        """Returns the tower's square, and 1."""
        side = config.vision_config.image_size
        return (side, side), 1


class TipsImages(TowerImages):
    """TIPSv2's images of one size, between 0 and 1. transformers has its processor for torchvision
    alone; SigLIP's does the same on Pillow with the fields that it has."""

    source = "SiglipImageProcessor"

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        fields = {**TIPS_FIELDS, **checkpoint.preprocessor}
        super().__init__(replace(checkpoint, preprocessor=fields), options)


class FlexibleImages(TransformersImages):
    """Images whose shape is kept, as rows of patches. Raises CheckpointError for patches of another
    size than the tower's."""

    token = "<image>"
    markers = ("<image>",)
    tensors = ("pixel_values", "spatial_shapes")
    is_whole_prompt = True
    auto_tokens = None  # an image has one token, whatever its size

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        found, side = self._fields["patch_size"], checkpoint.config.vision_config.patch_size
        if found != side:
            raise CheckpointError(
                f"the image processor makes patches of {found} pixels, the vision tower takes "
                f"{side}"
            )

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns 1."""
        return 1
