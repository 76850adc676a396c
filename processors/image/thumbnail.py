"""Makes small previews of image files for reports, by the decoder that the model's input uses."""

from __future__ import annotations

import io
import math

from PIL import Image

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import MediaLimits

from .decode import ImageDecoder

JPEG_QUALITY = 80
GAP = 2.0  # decoding at this multiple of the preview's size looks as good as at full size


def thumbnail(blob: bytes, size: int = 320) -> bytes | None:
    """Makes a JPEG of the image, upright, on white, with no side above `size` pixels, not enlarged.

    Returns None for a file that the decoder refuses: not a whole image, or over default limits.
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
    """Makes a JPEG of an RGB image with no side above `size` pixels; never enlarges it."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS, reducing_gap=GAP)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return buffer.getvalue()
