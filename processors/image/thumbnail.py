"""Small previews of image files, for reports: of exactly what the model is given."""

from __future__ import annotations

import io
import math

from PIL import Image

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import MediaLimits

from .decode import ImageDecoder

JPEG_QUALITY = 80
GAP = 2.0  # decoded this many times as large as the preview, which is as good as in full


def thumbnail(blob: bytes, size: int = 320) -> bytes | None:
    """A JPEG of the image, upright, on white, with no side above `size` pixels; never enlarged.

    None for what the decoder refuses: a file that is no whole image, or over the default limits.
    """

    def enough(height: int, width: int) -> tuple[int, int]:
        scale = min(1.0, GAP * size / max(height, width))
        return math.ceil(height * scale), math.ceil(width * scale)

    try:
        image = ImageDecoder().decode(blob, MediaLimits(), enough).image
    except RequestError:
        return None
    return small_jpeg(image, size)


def small_jpeg(image: Image.Image, size: int) -> bytes:
    """A JPEG of an RGB image with no side above `size` pixels; never enlarged."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS, reducing_gap=GAP)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return buffer.getvalue()
