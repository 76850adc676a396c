"""The image processor of PaddleOCR-VL."""

from __future__ import annotations

from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.processor import ImageProcessor


class PaddleOCRImageProcessor(ImageProcessor):
    """PaddleOCR-VL: 384 x 384 to 1536 x 1536 pixels by default. Patches that are merged are
    adjacent, where transformers orders patches row by row."""

    token = "<|IMAGE_PLACEHOLDER|>"
    markers = ("<|IMAGE_PLACEHOLDER|>",)
    default = ImageOptions(min_pixels=384 * 384, max_pixels=1536 * 1536)
    reads_pixel_bounds = True

    def target_size(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """Returns (height, width) after resizing; sides below one factor are enlarged first."""
        if self.options.do_resize:
            height, width = grow_sides(height, width, self.options.factor)
        return super().target_size(height, width, options)


def grow_sides(height: int, width: int, factor: int) -> tuple[int, int]:
    """Scales the image up until no side is below `factor`."""
    if height < factor:
        height, width = factor, round(width * factor / height)
    if width < factor:
        height, width = round(height * factor / width), factor
    return height, width
