"""From whatever a caller gives as a video to an OpenVideo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any

from mmdeploy_llm_processors.isolation import Workers
from PIL import Image

from mmdeploy_llm.hooks import MediaLimits

from . import files
from .files import check_bytes, open_file
from .frames import FrameList, as_frames
from .timeline import OpenVideo, Timeline


def open_video(source: Any, limits: MediaLimits, workers: Workers | None = None) -> OpenVideo:
    """The video behind bytes, a list of frames or an array; no frame of a file is decoded yet.

    workers: where files are opened and decoded; None: here. Raises MediaError for what cannot be
    read, MediaLimitError for what is over a limit, UnsupportedMediaError for another form or
    format.
    """
    if not isinstance(source, (bytes, bytearray, memoryview)):
        return FrameList(as_frames(source), limits)
    blob = bytes(source)
    check_bytes(blob, limits)
    if workers is not None:
        return IsolatedVideo(blob, limits, workers)
    return open_file(blob, limits)


class IsolatedVideo:
    """A video file that is opened and decoded in a worker process."""

    has_chosen_frames = False

    def __init__(self, blob: bytes, limits: MediaLimits, workers: Workers) -> None:
        self._blob, self._limits, self._workers = blob, limits, workers
        [(facts, _)] = self._call("survey")
        self.timeline = Timeline.from_json(facts)
        self.digest = blake2b(blob, digest_size=20).hexdigest()

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """See OpenVideo."""
        for _, pixels in self._call("frames", indices=list(indices)):
            yield Image.fromarray(pixels)

    def _call(self, name: str, **args: Any) -> Iterator[tuple[Any, Any]]:
        limits = self._limits
        bounds = {
            "max_bytes": limits.max_bytes,
            "max_pixels": limits.max_pixels,
            "max_frames": limits.max_frames,
            "max_duration": limits.max_duration,
        }
        return self._workers.stream(
            f"{files.__name__}:{name}",
            self._blob,
            {"limits": bounds, **args},
            timeout=limits.decode_timeout,
            max_memory=limits.decode_memory,
        )
