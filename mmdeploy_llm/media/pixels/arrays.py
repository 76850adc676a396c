"""Copies RGB images to numpy arrays."""

from __future__ import annotations

from typing import IO, cast

import numpy as np
from PIL import Image


class _Target:
    """A writable file in memory from numpy, which allocates it in large pages."""

    def __init__(self, num_bytes: int) -> None:
        self.values = np.empty(num_bytes, dtype=np.uint8)
        self.position = 0
        self._view = memoryview(self.values.data)

    def write(self, data: bytes) -> int:
        """Appends the bytes; raises ValueError when they do not fit."""
        self._view[self.position : self.position + len(data)] = data
        self.position += len(data)
        return len(data)


def to_array(image: Image.Image) -> np.ndarray:
    """Copies the RGB image to a new uint8 [H, W, 3].

    The image is written as a PPM file, a header followed by the pixels: Pillow's own conversion to
    numpy holds all pixels three times, and mapping that much fresh memory costs more than copying.
    """
    head = len(f"P6\n{image.width} {image.height}\n255\n")
    target = _Target(head + 3 * image.width * image.height)
    image.save(cast("IO[bytes]", target), "PPM")  # calls only `write`
    assert target.position == target.values.size, "Pillow wrote another header"
    return target.values[head:].reshape(image.height, image.width, 3)
