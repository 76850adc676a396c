"""The image processor of GLM-4V and GLM-OCR."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm_processors.image.budget import OF_PIXELS
from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.patches import fit_frames, unresized
from mmdeploy_llm_processors.image.processor import ImageProcessor

from mmdeploy_llm.hooks import Checkpoint

OCR_TOKENS = 6144  # of a page of GLM-OCR: its file's bound of 9,633,792 pixels, which count twice


class GlmImageProcessor(ImageProcessor):
    """GLM-4V and GLM-OCR: two frames per patch, whose area counts twice in min_pixels and
    max_pixels, as in transformers; by default 112 x 112 to 15,000 x 28 x 28."""

    token = "<|image|>"
    markers = ("<|image|>",)
    default = ImageOptions(min_pixels=112 * 112, max_pixels=15000 * 28 * 28, temporal_patch_size=2)
    reads_pixel_bounds = False

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        if (
            not OF_PIXELS & self._given
            and getattr(checkpoint.config, "model_type", None) == "glm_ocr"
        ):
            self.auto_tokens = OCR_TOKENS

    @property
    def area(self) -> int:
        """See ImageProcessor."""
        return super().area * self.options.temporal_patch_size

    def target_size(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """Returns (height, width) after resizing; see fit_frames."""
        options = options or self.options
        if not options.do_resize:
            return unresized(height, width, options.factor)
        group = options.temporal_patch_size
        return fit_frames(height, width, group, options, group=group)
