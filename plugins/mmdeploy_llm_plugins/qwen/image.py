"""The image processors of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

from __future__ import annotations

from dataclasses import replace

from mmdeploy_llm_processors.image.options import ImageOptions
from mmdeploy_llm_processors.image.processor import ImageProcessor


class QwenImageProcessor(ImageProcessor):
    """Qwen2-VL, Qwen2.5-VL: two frames per patch, 56 x 56 to 1280 x 28 x 28 pixels by default."""

    token = "<|image_pad|>"
    markers = ("<|image_pad|>",)
    default = ImageOptions(min_pixels=56 * 56, max_pixels=1280 * 28 * 28, temporal_patch_size=2)
    reads_pixel_bounds = True


class Qwen3ImageProcessor(QwenImageProcessor):
    """Qwen3-VL: patches of 16 pixels, 256 x 256 to 4096 x 4096 pixels by default."""

    default = replace(
        QwenImageProcessor.default,
        min_pixels=256 * 256,
        max_pixels=4096 * 4096,
        patch_size=16,
        image_mean=(0.5, 0.5, 0.5),
        image_std=(0.5, 0.5, 0.5),
    )
