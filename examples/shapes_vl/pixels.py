"""The sizes of images and clips, and what ERNIE's image processor makes of an image."""

from __future__ import annotations

import numpy as np
from mmdeploy_llm_processors.video.options import VideoOptions
from PIL import Image
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import smart_resize

PATCH, MERGE = 14, 2
MIN_PIXELS, MAX_PIXELS = 112 * 112, 168 * 168
PAIR = 2  # frames per token
# Written to the model's video_preprocessor_config.json.
VIDEO = VideoOptions(
    fps=2.0, min_frames=4, max_frames=8, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS
)


def preprocess(image: Image.Image) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return patches (before normalisation) and grid, exactly as ERNIE's image processor."""
    height, width = smart_resize(
        image.height, image.width, PATCH * MERGE, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS
    )
    resized = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
    rows, cols = height // PATCH, width // PATCH
    patches = resized.reshape(rows // MERGE, MERGE, PATCH, cols // MERGE, MERGE, PATCH, 3)
    patches = patches.transpose(0, 3, 1, 4, 6, 2, 5).reshape(rows * cols, 3 * PATCH * PATCH)
    return patches, (1, rows, cols)
