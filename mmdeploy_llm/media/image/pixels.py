"""Digests of the pixels of images, by the decoder that the model's input uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from PIL import Image

from mmdeploy_llm.hooks import MediaLimits

from .decode import ImageDecoder
from .files import digest_of


class PixelDigests:
    """Makes a digest of an image's size and pixels, upright and in RGB, in place of a preview:
    equal for a picture in two formats without loss, or with other metadata. Thread-safe. See
    CanPreview in media/loading/protocols.py."""

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
