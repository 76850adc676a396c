"""Decodes every accepted form of an image to an upright RGB image, within the limits.

An opened Pillow image is read at its current frame. Files are decoded in files.py.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from PIL import Image

from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.isolation import Workers
from mmdeploy_llm.values.first_bytes import HEAD

from .arrays import array_size, array_to_rgb
from .coded_colours import shown
from .files import (
    FORMATS,
    DecodedImage,
    ImageHeader,
    LeastSize,
    check_pixels,
    decode_file,
    digest_of,
    file_digest,
    oriented,
    peek_file,
    reading,
    sniff,
)
from .isolated import decode_apart, peek_apart
from .orientation import live_orientation, upright
from .tiff_pixels import exactly

__all__ = ["FORMATS", "DecodedImage", "Drawing", "ImageDecoder", "ImageHeader", "decode_image"]


class Drawing(ABC):
    """A picture that is drawn at the size that is wanted: nothing is drawn large to be shrunk.

    size: (width, height) at which it is drawn where no size is wanted; an image of the model has
        the shape of this. digest: of its content, equal for equal content alone. notes: sentences
        about what is a guess, known once it is drawn.
    """

    size: tuple[int, int]
    digest: str
    notes: tuple[str, ...] = ()

    @abstractmethod
    def draw(self, size: tuple[int, int], limits: MediaLimits) -> np.ndarray:
        """Returns the whole picture at (width, height), uint8 [height, width, 3]. Raises
        MediaError."""


NUM_LOCKS = 64


class ImageDecoder:
    """Opens and decodes images; safe for use from several threads. Files are decoded in worker
    processes when `limits.isolation` is "process", HEIF files always.

    workers: the pool of these processes; None: a pool of its own.
    """

    def __init__(self, workers: Workers | None = None) -> None:
        self._workers = workers or Workers()
        # A Pillow image loads its pixels on first use, which two threads must not do at once.
        self._locks = tuple(threading.Lock() for _ in range(NUM_LOCKS))

    def decode(
        self,
        source: Any,
        limits: MediaLimits,
        wanted: LeastSize | None = None,
        fit: LeastSize | None = None,
    ) -> DecodedImage:
        """Decodes bytes, a PIL image, a numpy array or a torch tensor, and draws a Drawing; changes
        none of them. Returns a DecodedImage as it is.

        wanted: lower bound of the size for decoding a JPEG file at draft quality; None: decode
        exactly. fit: (height, width) at which a Drawing is drawn for its own; None: its own.
        Raises MediaError for an unreadable image, MediaLimitError, before decoding, for one over a
        limit, and UnsupportedMediaError for another form or format.
        """
        if isinstance(source, (bytes, bytearray, memoryview)):
            if is_apart(source, limits):
                return decode_apart(bytes(source), limits, wanted, self._workers)
            return decode_file(bytes(source), limits, wanted)
        if isinstance(source, Drawing):
            return _drawn(source, limits, fit)
        if isinstance(source, DecodedImage):
            return source
        notes: list[str] = []
        image = self._loaded(source, limits, notes)
        return DecodedImage(image=image, digest=_pixel_digest(image), notes=tuple(notes))

    def image(
        self, source: Any, limits: MediaLimits, notes: list[str] | None = None
    ) -> Image.Image:
        """Decodes as `decode`, but returns the image only and spares loaded images the digest.
        notes: gets the image's."""
        told = [] if notes is None else notes
        if isinstance(source, (bytes, bytearray, memoryview, Drawing, DecodedImage)):
            made = self.decode(source, limits)
            told += made.notes
            return made.image
        return self._loaded(source, limits, told)

    def digest(self, source: Any, limits: MediaLimits) -> str:
        """Returns the digest that `decode` would; bytes are hashed without decoding or checks."""
        if isinstance(source, (bytes, bytearray, memoryview)):
            return file_digest(source, limits)
        if isinstance(source, Drawing):
            return _drawn_digest(source, source.size)
        if isinstance(source, DecodedImage):
            return source.digest
        return _pixel_digest(self._loaded(source, limits, []))

    def peek(self, source: Any, limits: MediaLimits) -> ImageHeader:
        """Reads the size of the image from its header. Raises as `decode` for what a header
        shows."""
        if isinstance(source, (bytes, bytearray, memoryview)):
            if is_apart(source, limits):
                return peek_apart(bytes(source), limits, self._workers)
            return peek_file(bytes(source), limits)
        if isinstance(source, (Drawing, DecodedImage)):
            return ImageHeader(size=source.size)
        if not isinstance(source, Image.Image):
            size = array_size(source)
            check_pixels(size, limits)
            return ImageHeader(size=size)
        check_pixels(source.size, limits)
        with self._lock(source), reading(source):
            orientation = live_orientation(source)
        return ImageHeader(size=oriented(source.size, orientation))

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        if limits.isolation == "process":
            return self._workers.max_seconds(limits)
        return limits.decode_timeout

    def close(self) -> None:
        """Ends the worker processes."""
        self._workers.close()

    def _loaded(self, source: Any, limits: MediaLimits, notes: list[str]) -> Image.Image:
        """Converts an image that the caller has loaded already."""
        if isinstance(source, Image.Image):
            check_pixels(source.size, limits)
            return self._caller_image(source, limits, notes)
        check_pixels(array_size(source), limits)
        return array_to_rgb(source)

    def _caller_image(
        self, image: Image.Image, limits: MediaLimits, notes: list[str]
    ) -> Image.Image:
        """Returns the caller's image upright and in RGB; the caller's object is only loaded."""
        with reading(image):
            with self._lock(image):
                image = exactly(image)
                image.load()
                orientation = live_orientation(image)
            return upright(shown(image, notes, is_managed=limits.is_as_shown), orientation)

    def _lock(self, image: Image.Image) -> threading.Lock:
        return self._locks[id(image) // 16 % NUM_LOCKS]


def decode_image(
    source: Any, limits: MediaLimits | None = None, workers: Workers | None = None
) -> DecodedImage:
    """Decodes one image of any form that ImageDecoder takes, within the limits, and raises as it.

    limits: None for the default ones. workers: the pool that decodes files where
    `limits.isolation` is "process"; None: a process of its own for this image. A processor keeps an
    ImageDecoder, whose processes serve many images.
    """
    decoder = ImageDecoder(workers)
    try:
        return decoder.decode(source, limits or MediaLimits())
    finally:
        if workers is None:
            decoder.close()


def is_apart(source: bytes | bytearray | memoryview, limits: MediaLimits) -> bool:
    """Returns whether a file is decoded in a worker process: HEIF always."""
    return limits.isolation == "process" or sniff(bytes(source[:HEAD])) == "HEIF"


def _pixel_digest(image: Image.Image) -> str:
    return digest_of(f"rgb {image.width} {image.height}".encode(), image.tobytes())


def _drawn(source: Drawing, limits: MediaLimits, fit: LeastSize | None) -> DecodedImage:
    """Draws at the size that `fit` gives for its own, so that no pixel is made in vain."""
    size = source.size if fit is None else fit(*source.size[::-1])[::-1]
    check_pixels(size, limits)
    image = Image.fromarray(source.draw(size, limits))
    return DecodedImage(
        image=image,
        digest=_drawn_digest(source, size),
        draft_of=None if size == source.size else source.size,
        notes=source.notes,
    )


def _drawn_digest(source: Drawing, size: tuple[int, int]) -> str:
    return digest_of(b"drawing", f"{source.digest} {source.size} {size}".encode())
