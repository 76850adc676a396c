"""Drawing: a picture without pixels of its own, such as a page, that is drawn when it is needed."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from mmdeploy_llm.hooks import MediaLimits


class Drawing(ABC):
    """A picture that is drawn at the size that is wanted: nothing is drawn large to be shrunk.

    size: (width, height) at which it is drawn where no size is wanted; an image of the model has
        the shape of this. digest: of its content, equal for equal content alone.
    """

    size: tuple[int, int]
    digest: str

    @abstractmethod
    def draw(self, size: tuple[int, int], limits: MediaLimits) -> np.ndarray:
        """Returns the whole picture at (width, height), uint8 [height, width, 3]. Raises
        MediaError."""
