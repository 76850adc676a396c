"""Random pictures for the tests of families with an encoder."""

import numpy as np
from PIL import Image


def picture(seed, size=(80, 50)):
    """Returns the random RGB picture of a seed. size: (width, height)."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (*size[::-1], 3), dtype=np.uint8))
