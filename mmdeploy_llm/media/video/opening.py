"""Opens every accepted form of a video as an OpenVideo."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image.files import check_bytes, file_digest
from mmdeploy_llm.media.isolation import Workers

from . import files
from .files import open_file
from .frames import FrameList, as_frames
from .timeline import OpenVideo, Timeline


def open_video(source: Any, limits: MediaLimits, workers: Workers | None = None) -> OpenVideo:
    """Opens bytes, a list of frames or an array; decodes no frame of a file yet.

    workers: the pool in which files are opened and decoded; None: in this process. Raises
    MediaError for an unreadable video, MediaLimitError for one over a limit, UnsupportedMediaError
    for another form or format.
    """
    if not isinstance(source, (bytes, bytearray, memoryview)):
        return FrameList(as_frames(source), limits, workers)
    blob = bytes(source)
    check_bytes(blob, "video", limits)
    if workers is not None:
        return IsolatedVideo(blob, limits, workers)
    return open_file(blob, limits)


class IsolatedVideo:
    """A video file that is opened and decoded in a worker process."""

    has_chosen_frames = False

    def __init__(self, blob: bytes, limits: MediaLimits, workers: Workers) -> None:
        self.notes: Sequence[str] = ()
        self._blob, self._limits, self._workers = blob, limits, workers
        [(fields, _)] = workers.decode(f"{files.__name__}:survey", blob, limits)
        self.timeline = Timeline.from_json(fields)
        self.digest = file_digest(blob, limits)

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """See OpenVideo."""
        answers = self._workers.decode(
            f"{files.__name__}:frames", self._blob, self._limits, indices=list(indices)
        )
        for fields, pixels in answers:
            assert pixels is not None
            self.notes = tuple(fields["notes"])
            yield Image.fromarray(pixels)
