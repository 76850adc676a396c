"""The image processor of ERNIE 4.5 VL."""

from __future__ import annotations

from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.patches import MAX_ASPECT
from mmdeploy_llm_processors.image.processor import ImageProcessor


class ErnieImageProcessor(ImageProcessor):
    """ERNIE 4.5 VL. The file's `size` bounds the area, by default 56 x 56 to 6177 x 28 x 28.

    Older preprocessor files also have min_pixels and max_pixels, which no implementation reads.
    """

    token = "<|IMAGE_PLACEHOLDER|>"
    markers = ("<|image@placeholder|>", "<|IMAGE_PLACEHOLDER|>")
    default = ImageOptions(min_pixels=56 * 56, max_pixels=6177 * 28 * 28)
    reads_pixel_bounds = False

    def target_size(
        self, height: int, width: int, options: ImageOptions | None = None
    ) -> tuple[int, int]:
        """Returns (height, width) after resizing; an aspect over 200 is reduced to 200."""
        if self.options.do_resize:
            height, width = clamp_aspect(height, width, self.options.factor)
        return super().target_size(height, width, options)


def clamp_aspect(height: int, width: int, factor: int) -> tuple[int, int]:
    """Applies FastDeploy's rule for ERNIE: reduces an aspect over 200 to 200, in whole factors.

    Source: FastDeploy's adaptive image preprocessor; transformers refuses such an image.
    """
    short, long = sorted((height, width))
    if long <= MAX_ASPECT * short:
        return height, width
    short = max(factor, round(short / factor) * factor)
    long = short * MAX_ASPECT // factor * factor
    return (short, long) if height < width else (long, short)
