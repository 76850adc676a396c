"""Makes small previews of images for reports, and digests of their pixels, by the decoder that the
model's input uses."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from PIL import Image

from mmdeploy_llm.hooks import MediaLimits

from .decode import ImageDecoder
from .files import digest_of

JPEG_QUALITY = 80
GAP = 2.0  # decoding at this multiple of the preview's size looks as good as at full size


class Thumbnails:
    """Makes previews of images for any model: upright, on white, no side above `size` pixels, not
    enlarged. Thread-safe. See CanPreview in media/loading/protocols.py."""

    kind: ClassVar[str] = "image"

    def __init__(self, size: int = 320) -> None:
        self._size = size
        self._decoder = ImageDecoder()

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return self._decoder.max_seconds(limits)

    def decode(self, source: Any, limits: MediaLimits) -> Image.Image:
        """Decodes the image, a JPEG file at draft quality. Raises as ImageDecoder.decode."""

        def enough(height: int, width: int) -> tuple[int, int]:
            scale = min(1.0, GAP * self._size / max(height, width))
            return math.ceil(height * scale), math.ceil(width * scale)

        return self._decoder.decode(source, limits, enough, enough).image

    def previews(self, item: Image.Image, options: Mapping[str, Any]) -> tuple[bytes]:
        """Returns one JPEG."""
        return (small_jpeg(item, self._size),)


def small_jpeg(image: Image.Image, size: int) -> bytes:
    """Makes a JPEG of an RGB image with no side above `size` pixels; never enlarges it."""
    small = image.copy()
    small.thumbnail((size, size), Image.Resampling.LANCZOS, reducing_gap=GAP)
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=JPEG_QUALITY, optimize=True)
    return buffer.getvalue()


class PixelDigests:
    """Makes a digest of an image's size and pixels, upright and in RGB, in place of a preview:
    equal for a picture in two formats without loss, or with other metadata. Thread-safe. See
    CanPreview in media/loading/loader.py."""

    kind: ClassVar[str] = "image"

    def __init__(self) -> None:
        self._decoder = ImageDecoder()

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return self._decoder.max_seconds(limits)

    def decode(self, source: Any, limits: MediaLimits) -> Image.Image:
        """Decodes the image exactly. Raises as ImageDecoder.decode."""
        return self._decoder.decode(source, limits).image

    def previews(self, item: Image.Image, options: Mapping[str, Any]) -> tuple[bytes]:
        """Returns the digest, in ASCII."""
        size = f"rgb {item.width} {item.height}".encode()
        return (digest_of(size, item.tobytes()).encode(),)
