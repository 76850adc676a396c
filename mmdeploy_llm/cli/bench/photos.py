"""Generates pictures for the workloads: smooth random colours, and photo-like JPEG files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PHOTO_WIDTH, PHOTO_HEIGHT = 4000, 3000
CELLS = 14  # random colours along each side
GRAIN = 6  # sensor noise, +- levels of 255; without it the files compress far better than photos
QUALITY = 90


def smooth_pixels(rng: np.random.Generator, width: int, height: int) -> NDArray[np.uint8]:
    """Returns [height, width, 3] pixels of random colours with smooth transitions."""
    cells = rng.integers(0, 255, (CELLS, CELLS, 3), dtype=np.uint8)
    image = Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def write_photo(rng: np.random.Generator, path: Path) -> Path:
    """Writes a JPEG file of 12 megapixels, 3 to 4 MB; returns its path."""
    pixels = smooth_pixels(rng, PHOTO_WIDTH, PHOTO_HEIGHT).astype(np.int16)
    pixels += rng.integers(-GRAIN, GRAIN + 1, (PHOTO_HEIGHT, PHOTO_WIDTH, 1), dtype=np.int16)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
    return path
