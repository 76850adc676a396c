"""The image processor of Florence-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from mmdeploy_llm_processors.from_transformers import TransformersImages

from mmdeploy_llm.hooks import Checkpoint


class FlorenceImageProcessor(TransformersImages):
    """CLIP's processor, with the size that the checkpoint says: one square for all images."""

    source = "CLIPImageProcessor"
    token = "<image>"
    markers = ("<image>",)
    auto_tokens = None  # every image has the same number

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._vision = checkpoint.config.vision_config
        super().__init__(checkpoint, options)

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns the cells of the last stage's grid, and one for their mean."""
        height, width = made["pixel_values"].shape[-2:]
        vision = self._vision
        stages = zip(vision.patch_size, vision.patch_stride, vision.patch_padding, strict=True)
        for size, stride, padding in stages:
            height, width = ((side + 2 * padding - size) // stride + 1 for side in (height, width))
        return height * width + 1
