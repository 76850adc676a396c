"""Pictures for the workloads: smooth random colours, and JPEG files as cameras write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PHOTO_WIDTH, PHOTO_HEIGHT = 4000, 3000
CELLS = 14  # random colours on each side
GRAIN = 6  # levels of 255 to both sides, as a sensor has it; without it files are unlike photos
QUALITY = 90


def smooth_pixels(rng: np.random.Generator, width: int, height: int) -> NDArray[np.uint8]:
    """[height, width, 3]."""
    cells = rng.integers(0, 255, (CELLS, CELLS, 3), dtype=np.uint8)
    image = Image.fromarray(cells).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image)


def write_photo(rng: np.random.Generator, path: Path) -> Path:
    """A JPEG file of 12 megapixels, 3 to 4 MB."""
    pixels = smooth_pixels(rng, PHOTO_WIDTH, PHOTO_HEIGHT).astype(np.int16)
    pixels += rng.integers(-GRAIN, GRAIN + 1, (PHOTO_HEIGHT, PHOTO_WIDTH, 1), dtype=np.int16)
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=QUALITY)
    return path
