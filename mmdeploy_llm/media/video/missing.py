"""Finds what a cut-off file lacks: frames that its index names, or seconds that its header says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import av
from av.container import InputContainer
from av.video.stream import VideoStream

from .joined import Packet

TOLERANCE = 1.0  # seconds by which a header may be wrong, beside the longest gap between frames


def missing(
    container: InputContainer, stream: VideoStream, packets: Sequence[Packet], size: int
) -> tuple[str, ...]:
    """Returns the note on frames that a file announces and does not hold, () where it holds all.

    size: of the file, in bytes. The index of MP4, MOV and AVI says where frames lie; that of others
    is made while they are read. Matroska's tag DURATION is the end of a track, and a header's
    duration that of all tracks, so it is compared where the video is the only one.
    """
    index = stream.index_entries
    if len(index) and index[-1].pos + index[-1].size > size:
        lost = len(index) - len(packets)
        what = f"its last {lost} frames lie" if lost > 0 else "its last frame lies"
        return (f"the video is cut off: {what} beyond the end of the file",)
    announced, times = _announced(container, stream), _times(stream, packets)
    if announced is None or len(times) < 2:
        return ()
    gaps = (later - time for time, later in pairwise(times))
    if announced - times[-1] <= TOLERANCE + max(gaps):
        return ()
    end = f"its last frame is at {times[-1]:.1f} s"
    return (f"the video is cut off: the file says that it lasts {announced:.1f} s, and {end}",)


def _announced(container: InputContainer, stream: VideoStream) -> float | None:
    """Returns the end of the track in seconds by what the file says, None where it does not."""
    hours, minutes, seconds = (*stream.metadata.get("DURATION", "").split(":"), "", "", "")[:3]
    if hours.isdecimal() and minutes.isdecimal() and seconds.replace(".", "", 1).isdecimal():
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    if len(container.streams) > 1 or not container.duration:
        return None
    return float(((container.start_time or 0) + container.duration) / av.time_base)


def _times(stream: VideoStream, packets: Sequence[Packet]) -> list[float]:
    unit = float(stream.time_base or 0)
    return sorted(own.pts * unit for own in packets if own.pts is not None)
