"""Reads videos that the caller has loaded: lists of frames, and arrays or tensors of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, cast

import numpy as np
from PIL import Image

from mmdeploy_llm.errors import MediaError, UnsupportedMediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image.decode import ImageDecoder
from mmdeploy_llm.media.isolation import Workers

from .timeline import UNKNOWN_RATE, check_size, constant_timeline


class FrameList:
    """A video of the caller's frames: PIL images, arrays [H, W, 3], tensors, or encoded images, all
    of one size. Raises MediaError and its subclasses."""

    has_chosen_frames = True

    def __init__(
        self, frames: Sequence[Any], limits: MediaLimits, workers: Workers | None = None
    ) -> None:
        if not len(frames):
            raise MediaError("the video is an empty list of frames")
        limits.check_frames(len(frames))
        self._frames, self._limits, self._decoder = frames, limits, ImageDecoder(workers)
        width, height = self._decoder.peek(frames[0], limits).size
        check_size(width, height, limits)
        self.timeline = constant_timeline(width, height, len(frames), UNKNOWN_RATE)
        digest = blake2b(f"frames {len(frames)}\0".encode(), digest_size=20)
        for frame in frames:
            digest.update(self._decoder.digest(frame, limits).encode())
        self.digest = digest.hexdigest()
        self.notes: Sequence[str] = ()

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """See OpenVideo."""
        size = (self.timeline.width, self.timeline.height)
        self.notes = notes = list[str]()
        for index in indices:
            image = self._decoder.image(self._frames[index], self._limits, notes)
            if image.size != size:
                raise MediaError(
                    f"frame {index} of the video has {image.width} x {image.height} pixels, the "
                    f"first has {size[0]} x {size[1]}; give frames of one size"
                )
            yield image


def as_frames(source: Any) -> Sequence[Any]:
    """Returns the frames of a list, or of an array or tensor of four dimensions. Raises
    UnsupportedMediaError for another form."""
    if isinstance(source, (list, tuple)):
        return source
    if isinstance(source, Image.Image):
        raise UnsupportedMediaError(
            "a single image was given as a video; give a list of frames: "
            "{'video': [[frame, frame, ...]]}"
        )
    shape = getattr(source, "shape", None)
    if shape is None or len(shape) != 4:
        found = f"of shape {list(shape)}" if shape is not None else type(source).__name__
        raise UnsupportedMediaError(
            f"a video {found} is not accepted; give a path, bytes, a file object, a list of "
            "frames, or an array [frames, height, width, 3]"
        )
    return cast("Sequence[Any]", source) if isinstance(source, np.ndarray) else list(source)
