"""From whatever a caller gives as an image to an upright RGB image, within the limits.

Of an opened Pillow image the frame counts that it stands at. Files: see files.py.
"""

from __future__ import annotations

import threading
from typing import Any

from mmdeploy_llm_processors.isolation import Workers
from PIL import Image

from mmdeploy_llm.hooks import MediaLimits

from .arrays import array_size, array_to_rgb
from .files import (
    FORMATS,
    DecodedImage,
    ImageHeader,
    Wanted,
    check_pixels,
    decode_file,
    digest_of,
    peek_file,
    reading,
    turned,
)
from .isolated import decode_apart, peek_apart
from .modes import to_rgb
from .orientation import live_orientation, upright

__all__ = ["FORMATS", "DecodedImage", "ImageDecoder", "ImageHeader"]

NUM_LOCKS = 64


class ImageDecoder:
    """Opens and decodes images, from several threads at once; files in processes of their own
    where `limits.isolation` is "process".

    workers: these processes, None: of its own.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self._workers = workers or Workers()
        # An opened Pillow image loads its pixels on first use; two threads must not do so at once.
        self._locks = tuple(threading.Lock() for _ in range(NUM_LOCKS))

    def decode(
        self, source: Any, limits: MediaLimits, wanted: Wanted | None = None
    ) -> DecodedImage:
        """The image behind bytes, a PIL image, a numpy array or a torch tensor; none is changed.

        wanted: has the bytes of a JPEG decoded at draft quality, no smaller than it says; None:
        exactly. Raises MediaError for what cannot be read, MediaLimitError for what is over a
        limit, before it is decoded, and UnsupportedMediaError for another form or format.
        """
        if isinstance(source, (bytes, bytearray, memoryview)):
            if limits.isolation == "process":
                return decode_apart(bytes(source), limits, wanted, self._workers)
            return decode_file(bytes(source), limits, wanted)
        image = self._loaded(source, limits)
        return DecodedImage(image=image, digest=_pixel_digest(image))

    def image(self, source: Any, limits: MediaLimits) -> Image.Image:
        """As `decode`, the image alone; what is loaded already is not looked through for a
        digest."""
        if isinstance(source, (bytes, bytearray, memoryview)):
            return self.decode(source, limits).image
        return self._loaded(source, limits)

    def digest(self, source: Any, limits: MediaLimits) -> str:
        """The digest that `decode` gives; of bytes, which are not decoded for it, whatever they
        are."""
        if isinstance(source, (bytes, bytearray, memoryview)):
            return digest_of(b"encoded", source)
        return _pixel_digest(self._loaded(source, limits))

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """The size of the image, from its header. Raises as `decode`, as far as a header tells."""
        if isinstance(source, (bytes, bytearray, memoryview)):
            if limits.isolation == "process":
                return peek_apart(bytes(source), limits, self._workers)
            return peek_file(bytes(source), limits)
        if not isinstance(source, Image.Image):
            size = array_size(source)
            check_pixels(size, limits)
            return ImageHeader(size=size)
        check_pixels(source.size, limits)
        with self._lock(source), reading(source):
            orientation = live_orientation(source)
        return ImageHeader(size=turned(source.size, orientation))

    def max_seconds(self, limits: MediaLimits) -> float:
        """What one call may take before it counts as hanging."""
        is_apart = limits.isolation == "process"
        return self._workers.max_seconds(limits) if is_apart else limits.decode_timeout

    def close(self) -> None:
        """Ends the processes."""
        self._workers.close()

    def _loaded(self, source: Any, limits: MediaLimits) -> Image.Image:
        """The RGB image that the caller has loaded already."""
        if isinstance(source, Image.Image):
            check_pixels(source.size, limits)
            return self._caller_image(source)
        check_pixels(array_size(source), limits)
        return array_to_rgb(source)

    def _caller_image(self, image: Image.Image) -> Image.Image:
        """The caller's image upright and in RGB; loading is all that happens to it."""
        with reading(image):
            with self._lock(image):
                image.load()
                orientation = live_orientation(image)
            return upright(to_rgb(image), orientation)

    def _lock(self, image: Image.Image) -> threading.Lock:
        return self._locks[id(image) // 16 % NUM_LOCKS]


def _pixel_digest(image: Image.Image) -> str:
    return digest_of(f"rgb {image.width} {image.height}".encode(), image.tobytes())
