"""Small previews of image files, for reports: of exactly what the model is given."""

from __future__ import annotations

import io

from PIL import Image

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import MediaLimits

from .decode import ImageDecoder

JPEG_QUALITY = 80


def thumbnail(blob: bytes, size: int = 320) -> bytes | None:
    """A JPEG of the image, upright, on white, with no side above `size` pixels; never enlarged.

    None for what the decoder refuses: a file that is no whole image, or over the default limits.
    """
    try:
        image = ImageDecoder().decode(blob, MediaLimits()).image
    except RequestError:
        return None
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS, reducing_gap=2.0)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return buffer.getvalue()
