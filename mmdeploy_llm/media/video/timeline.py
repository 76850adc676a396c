"""Timeline: the size and frame times of a video, known before any frame is decoded."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Protocol

from PIL import Image

from mmdeploy_llm.errors import MediaLimitError
from mmdeploy_llm.hooks import MediaLimits

# Frame lengths that differ by at most this fraction of their median count as equal: some containers
# round times to milliseconds.
RATE_TOLERANCE = 0.1
UNKNOWN_RATE = 24.0  # frames per second of a video that does not say, as in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Size and frames of a video.

    width, height: pixels, upright.
    times: seconds from the first frame to each, so the first is 0.
    duration: seconds from the first frame to the end of the last.
    is_constant: all frames are equally long, so frame i comes i * duration / num_frames after the
        first.
    start: seconds from the beginning of the video to its first frame: above 0 where none before it
        can be decoded.
    notes: what of the video is not seen, or is a guess, in sentences.
    """

    width: int
    height: int
    times: Sequence[float]
    duration: float
    is_constant: bool
    start: float = 0.0
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Returns all fields, for `from_json`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Timeline:
        """Rebuilds a timeline from the fields that `to_json` returned."""
        return cls(**{**values, "notes": tuple(values["notes"])})

    @property
    def num_frames(self) -> int:
        """Number of frames in the video."""
        return len(self.times)

    @property
    def fps(self) -> float:
        """Frames per second, on average."""
        return self.num_frames / self.duration

    def time_of(self, index: int) -> float:
        """Returns the seconds from the beginning of the video at which frame `index` appears."""
        if self.is_constant:
            return self.start + index / self.fps
        return self.start + self.times[index]

    def at(self, times: Sequence[float]) -> Timeline:
        """Returns the timeline of the same frames where they appear at these seconds, ascending."""
        seen = [time - times[0] for time in times]
        last = seen[-1] / (len(seen) - 1) if len(seen) > 1 else 1 / UNKNOWN_RATE
        return replace(
            self,
            times=seen,
            duration=seen[-1] + last,
            is_constant=is_even(seen),
            start=times[0],
        )

    @property
    def end(self) -> float:
        """The seconds from the beginning of the video to the end of its last frame."""
        return self.start + self.duration


def is_even(times: Sequence[float]) -> bool:
    """Returns whether frames that appear at these seconds, the first at 0, are equally long."""
    if len(times) < 3:
        return True
    usual = statistics.median(after - before for before, after in pairwise(times))
    slack = max(RATE_TOLERANCE * usual, 0.002)
    # Frames may be slightly early or late, but must not drift away from an even spacing.
    mean = times[-1] / (len(times) - 1)
    return all(abs(time - index * mean) <= slack for index, time in enumerate(times))


def constant_timeline(width: int, height: int, num_frames: int, fps: float) -> Timeline:
    """Builds the timeline of frames of equal length."""
    return Timeline(
        width=width,
        height=height,
        times=[index / fps for index in range(num_frames)],
        duration=num_frames / fps,
        is_constant=True,
    )


class OpenVideo(Protocol):
    """A video whose frames can be read. digest: hash of its content. has_chosen_frames: the caller
    gave a list of frames, so all are used unless an option of the item says otherwise. notes: what
    was a guess of the frames that were read, beside the timeline's."""

    timeline: Timeline
    digest: str
    has_chosen_frames: bool
    notes: Sequence[str]

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """Yields upright RGB images of these frames; a frame that cannot be decoded is replaced by
        its nearest neighbour. indices: ascending. Raises MediaError."""


def lost_frames(count: int) -> tuple[str, ...]:
    """Returns the note on frames that cannot be decoded, or not whole, () for none."""
    if count == 0:
        return ()
    return (f"{count} of the frames seen are damaged; the nearest ones, or their parts, stand in",)


def check_size(width: int, height: int, limits: MediaLimits) -> None:
    """Raises MediaLimitError for frames over the pixel limit."""
    if width * height > limits.max_pixels:
        raise MediaLimitError(
            f"the video's frames have {width} x {height} = {width * height} pixels, "
            f"{limits.max_pixels} are allowed; shrink it or raise max_image_pixels"
        )


def check_duration(seconds: float, limits: MediaLimits) -> None:
    """Raises MediaLimitError for videos that are, or claim to be, too long."""
    if seconds > limits.max_duration:
        raise MediaLimitError(
            f"the video is {seconds:.0f} seconds long, {limits.max_duration:.0f} are allowed; "
            "shorten it or raise max_video_seconds"
        )
