"""Reads videos in container files, through PyAV (FFmpeg).

A first pass over the packets, without decoding, finds the time of every frame and the key frames.
Reading then goes forward and seeks to a key frame whenever one lies between the current position
and the next wanted frame, so that no frame is decoded needlessly.

The container's format is determined here, by its first bytes, and only formats that hold media
themselves are opened: never playlists, which name other files or URLs.
"""

from __future__ import annotations

import bisect
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import Literal

import av
from av.container import InputContainer
from av.video.stream import VideoStream
from PIL import Image

from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.image.files import file_digest
from mmdeploy_llm.media.sound.clock import RESTARTS
from mmdeploy_llm.values.first_bytes import HEAD, format_of

from .display import Display, pixel_aspect, shown_size
from .joined import Joined, Packet, joined
from .missing import missing
from .timeline import (
    UNKNOWN_RATE,
    Timeline,
    check_duration,
    check_size,
    is_even,
    lost_frames,
)

FORMATS = ("mp4", "matroska", "avi", "flv", "asf", "ogg", "mpeg", "mpegts")
WITHOUT_PTS = ("avi", "asf")  # FFmpeg makes up times of presentation for them
JOINED = (*RESTARTS, "matroska")  # which FFmpeg reads on after the end of a recording
Clock = Literal["pts", "dts", "index", "joined"]
MAX_PROBED = 2000  # packets that are looked at to tell which of several videos moves
MAX_RATE = 240  # frames per second; times the longest allowed duration it bounds the frames
# Largest distance of a neighbour that replaces a frame that cannot be decoded (FastDeploy's rule).
NEIGHBOURS, NEIGHBOURS_AT_ENDS = 10, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The result of the first pass.

    pts: times of the frames, ascending, in units of time_base. keys: times of the key frames.
    clock: what tells these times of a decoded frame; "index": the container lacks the time of some
        frame, or gives frames those of others, so pts are 0, 1, 2, ... "joined": the same, and
        `joined` says which frame that is.
    has_keys: some packet is marked as a key frame, so decoding begins with one.
    aspect: width of a pixel by its height. is_mapped: whether high dynamic range is.
    """

    timeline: Timeline
    pts: Sequence[int]
    keys: Sequence[int]
    clock: Clock
    has_keys: bool
    aspect: Fraction
    is_mapped: bool
    joined: Joined | None = None


class _SeekError(Exception):
    """Seeking did not reach the requested key frame."""


def sniff(head: bytes) -> str | None:
    """Returns FFmpeg's name of the container that the first bytes announce; None if unknown."""
    found = format_of(head[:HEAD])
    return found.container if found and found.container in FORMATS else None


class ContainerVideo:
    """A video in encoded form. Raises MediaError and its subclasses when it cannot be used."""

    has_chosen_frames = False

    def __init__(self, blob: bytes, name: str, limits: MediaLimits) -> None:
        self.notes: Sequence[str] = ()
        self._blob = blob
        self._format = name
        with self._opened() as (container, stream):
            self._track = _survey(container, stream, len(blob), limits)
        self.timeline = self._track.timeline
        self.digest = file_digest(blob, limits)

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """See OpenVideo."""
        num_lost = 0
        for frame, is_lost in self._decoded(indices):
            num_lost += is_lost
            self.notes = lost_frames(num_lost)
            yield frame

    def _decoded(self, indices: Sequence[int]) -> Iterator[tuple[Image.Image, bool]]:
        num_done = 0
        try:
            for frame in self._read(indices, self._track.keys):
                yield frame
                num_done += 1
        except _SeekError:  # decode from the beginning, which is slower
            yield from self._read(indices[num_done:], keys=())

    def _read(
        self, indices: Sequence[int], keys: Sequence[int]
    ) -> Iterator[tuple[Image.Image, bool]]:
        """Yields frames, and whether another one stands for the wanted one."""
        with self._opened() as (container, stream):
            reader = _Reader(container, stream, self._track, keys)
            for index in indices:
                yield reader.at(index)

    @contextmanager
    def _opened(self) -> Iterator[tuple[InputContainer, VideoStream]]:
        """Opens the file; raises FFmpeg's errors as MediaError without their untrusted messages."""
        try:
            with av.open(
                io.BytesIO(self._blob),
                format=self._format,
                metadata_errors="replace",
                options={"protocol_whitelist": ""},
            ) as container:
                yield container, _video_stream(container)
        except RequestError:
            raise
        except (av.error.FFmpegError, ValueError, ArithmeticError, EOFError) as error:
            # The bytes are in memory: FFmpeg's PermissionError says nothing about a file.
            what = "FFmpegError" if isinstance(error, PermissionError) else type(error).__name__
            raise MediaError(
                f"the {self._format} video is corrupt or truncated ({what} while reading it)"
            ) from None
        except MemoryError:
            raise MediaLimitError(
                "there is not enough memory to decode the video; shrink it"
            ) from None


def _tracks(container: InputContainer) -> list[VideoStream]:
    """Returns the video streams that are not cover art, the one that players show first: moving
    pictures before those of one frame, default ones before others, then the largest."""
    cover = av.stream.Disposition.attached_pic
    found = [stream for stream in container.streams.video if not stream.disposition & cover]
    if len(found) < 2:
        return found
    counts = Counter[int]()
    for packet in islice(container.demux(found), MAX_PROBED):
        counts[packet.stream_index] += bool(packet.size)
        if all(counts[stream.index] > 1 for stream in found):
            break
    container.seek(0)

    def rank(stream: VideoStream) -> tuple[bool, bool, bool, int]:
        context = stream.codec_context
        is_default = bool(stream.disposition & av.stream.Disposition.default)
        area = 0 if context is None else context.width * context.height
        return context is not None, counts[stream.index] > 1, is_default, area

    return sorted(found, key=rank, reverse=True)


def _video_stream(container: InputContainer) -> VideoStream:
    """Returns the video stream that players show. Raises UnsupportedMediaError without one."""
    for stream in _tracks(container):
        if stream.codec_context is None:
            raise UnsupportedMediaError("the video's codec is not known to this FFmpeg")
        stream.thread_count = 1  # the intake already decodes in several threads
        return stream
    kinds: list[str] = sorted({stream.type for stream in container.streams}) or ["nothing"]
    raise UnsupportedMediaError(
        f"the file has no video in it, only {', '.join(kinds)}; give a video, or remove the item"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _First:
    """The first frame that can be decoded. dts: of the packet with which the decoder gave
    it. size: (width, height), as it is displayed."""

    pts: int | None
    dts: int | None
    size: tuple[int, int]


def _survey(
    container: InputContainer, stream: VideoStream, size: int, limits: MediaLimits
) -> Track:
    width, height = stream.codec_context.width, stream.codec_context.height
    if width < 1 or height < 1:
        raise MediaError("the video does not say how large its frames are; it may be truncated")
    check_size(width, height, limits)
    if container.duration and container.format.name not in RESTARTS:
        check_duration(container.duration / av.time_base, limits)
    packets = _packets(container, stream, int(limits.max_duration * MAX_RATE))
    if not packets:
        raise MediaError("the video holds no frame that can be read; it may be truncated")
    has_keys = any(packet.is_key for packet in packets)
    aspect = pixel_aspect(stream.sample_aspect_ratio if limits.is_as_shown else None)
    first = _first_frame(container, stream, aspect, has_keys=has_keys)
    clock, pts, times = _clock(container, stream, packets, first)
    parts = _joined(container, stream, packets) if clock == "pts" else None
    if parts is not None:
        clock, pts, times = "joined", range(len(parts.times)), [*parts.times]
    keys = sorted(
        {own for each in packets if each.is_key and (own := _time_on(clock, each)) is not None}
    )
    start = _start(clock, pts, first, parts)
    begin = times[start]
    notes = _notes(container, stream, packets, begin, parts, size)
    pts, times = pts[start:], [time - begin for time in times[start:]]
    last = times[-1] / (len(times) - 1) if len(times) > 1 else 1 / _rate(stream)  # as the others
    check_duration(times[-1] + last, limits)
    width, height = (width, height) if first is None else first.size
    check_size(width, height, limits)
    timeline = Timeline(
        width=width,
        height=height,
        times=times,
        duration=times[-1] + last,
        is_constant=is_even(times),
        start=begin,
        notes=notes,
    )
    return Track(
        timeline=timeline,
        pts=pts,
        keys=keys,
        clock=clock,
        has_keys=has_keys,
        aspect=aspect,
        is_mapped=limits.is_as_shown,
        joined=parts,
    )


def _joined(
    container: InputContainer, stream: VideoStream, packets: Sequence[Packet]
) -> Joined | None:
    """Returns the frames of joined recordings; None where the file is one."""
    name = container.format.name
    if name not in JOINED:
        return None
    unit = float(stream.time_base or Fraction(1, 1000))
    return joined(packets, unit, 1 / _rate(stream), may_leap=name in RESTARTS)


def _start(clock: Clock, pts: Sequence[int], first: _First | None, parts: Joined | None) -> int:
    """Returns the place of the first frame that can be decoded; 0 where nothing tells it."""
    if parts is not None:
        place = parts.place_of(first.pts, after=-1) if first else None
        # Seeking to the beginning may have found that of a later recording.
        return place if place is not None and place < parts.num_first else 0
    time = None if first is None else _time_on(clock, first)
    start = 0 if time is None else bisect.bisect_left(pts, time)
    return start if start < len(pts) else 0


def _notes(
    container: InputContainer,
    stream: VideoStream,
    packets: Sequence[Packet],
    unseen: float,
    parts: Joined | None,
    size: int,
) -> tuple[str, ...]:
    """Says what of the file is not seen, or guessed. unseen: seconds before the first frame. size:
    of the file, in bytes."""
    notes = []
    if (num := len(_tracks(container))) > 1:
        notes.append(f"the file has {num} videos in it, of which number {stream.index} is used")
    if unseen:
        notes.append(
            f"the first {unseen:.2f} s of the video cannot be seen: no frame of them can be decoded"
        )
    if parts is not None:
        notes.append(parts.note())
    else:
        notes += missing(container, stream, packets, size)
    if any(each.pts is None for each in packets):
        notes.append(
            f"times of the video's frames are counted, at {_rate(stream):g} frames a second: the "
            "file does not say them all"
        )
    return tuple(notes)


def _clock(
    container: InputContainer,
    stream: VideoStream,
    packets: Sequence[Packet],
    first: _First | None,
) -> tuple[Clock, Sequence[int], list[float]]:
    """Returns what tells the time of a decoded frame, these times, and the same in seconds, from 0.

    AVI and ASF have no times of presentation where frames refer to later ones: their decoder shows
    a frame when it has read the packet that stands in its place, a few after its own.
    """
    unit = float(stream.time_base or Fraction(1, 1000))
    if container.format.name in WITHOUT_PTS:
        dts = sorted(each.dts for each in packets if each.dts is not None)
        if len(dts) == len(packets) == len(set(dts)):
            delay = 0
            if first is not None and first.dts is not None:
                delay = bisect.bisect_left(dts, first.dts)
            if not stream.codec_context.has_b_frames:
                return "dts", dts, [(time - dts[0]) * unit for time in dts]
            step = 1 / _rate(stream)
            times = [(time - dts[delay]) * unit for time in dts[delay:]]
            times += [times[-1] + step * (number + 1) for number in range(delay)]
            return "index", range(len(packets)), times
    pts = sorted({each.pts for each in packets if each.pts is not None})
    if any(each.pts is None for each in packets) or (
        container.format.name in WITHOUT_PTS and stream.codec_context.has_b_frames
    ):
        return "index", range(len(packets)), [at / _rate(stream) for at in range(len(packets))]
    return "pts", pts, [(time - pts[0]) * unit for time in pts]


def _time_on(clock: Clock, frame: Packet | _First | av.VideoFrame) -> int | None:
    """Returns the time of a packet or frame in the units of its stream; None where it has none."""
    return frame.pts if clock == "pts" else frame.dts if clock == "dts" else None


def _packets(container: InputContainer, stream: VideoStream, max_frames: int) -> list[Packet]:
    """Returns all packets, one for each frame; for a truncated file, those before its end. Raises
    MediaLimitError for more than max_frames."""
    found: list[Packet] = []
    try:
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                found.append(Packet(pts=packet.pts, dts=packet.dts, is_key=packet.is_keyframe))
            if len(found) > max_frames:
                raise MediaLimitError(f"the video has more than {max_frames} frames; shorten it")
    except av.error.FFmpegError:
        if not found:
            raise
    return found


def _first_frame(
    container: InputContainer, stream: VideoStream, aspect: Fraction, *, has_keys: bool
) -> _First | None:
    """Decodes until there is a frame; returns None if none can be decoded."""
    container.seek(0)
    for frame in _frames(container, stream, from_key=has_keys):
        return _First(pts=frame.pts, dts=frame.dts, size=shown_size(frame, aspect))
    return None


def _rate(stream: VideoStream) -> float:
    """Returns the frames per second that the container announces, if plausible, else a default."""
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    return rate if 0 < rate <= MAX_RATE else UNKNOWN_RATE


def _frames(
    container: InputContainer, stream: VideoStream, *, from_key: bool
) -> Iterator[av.VideoFrame]:
    """Yields the undamaged frames from here on. from_key: packets before a key frame are left
    out, of which some decoders make grey pictures."""
    is_on = not from_key
    try:
        for packet in container.demux(stream):
            is_on = is_on or packet.is_keyframe
            if is_on:
                yield from _decoded(packet)
    except av.error.FFmpegError:  # the rest of the file cannot be read
        return


def _decoded(packet: av.Packet) -> list[av.VideoFrame]:
    """Returns the undamaged frames that a packet completes."""
    try:
        return [frame for frame in packet.decode() if not frame.is_corrupt]
    except (av.error.FFmpegError, ValueError):
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """A decoded frame and its time on the track."""

    pts: int
    frame: av.VideoFrame


class _Reader:
    """Reads frames in ascending order; seeks to the last key frame before the wanted one."""

    def __init__(
        self, container: InputContainer, stream: VideoStream, track: Track, keys: Sequence[int]
    ) -> None:
        self._container, self._stream = container, stream
        self._track, self._keys = track, keys
        shown = track.timeline.width, track.timeline.height
        self._display = Display(track.aspect, shown, is_mapped=track.is_mapped)
        self._frames = self._decode()
        self._earlier: _Frame | None = None  # the last frame before the wanted one
        self._here: _Frame | None = None  # the frame at or after the wanted one

    def at(self, index: int) -> tuple[Image.Image, bool]:
        """Returns frame `index`, or the nearest that can be decoded, and whether it is another or
        FFmpeg has filled parts of it. Raises MediaError when none is near, and _SeekError."""
        wanted = self._track.pts[index]
        has_jumped = self._jump(wanted)
        while self._here is None or self._here.pts < wanted:
            frame = next(self._frames, None)
            if frame is None:
                break
            self._earlier, self._here = self._here, frame
        if has_jumped and (
            self._here is None or (self._earlier is None and self._here.pts > wanted)
        ):
            raise _SeekError
        nearest = self._nearest(index, wanted)
        is_lost = nearest.pts != wanted or nearest.frame.is_corrupt
        return self._display.shown(nearest.frame), is_lost

    def _jump(self, wanted: int) -> bool:
        """Seeks to the last key frame at or before `wanted` if it is after the current frame.

        Returns whether it did. Raises _SeekError when FFmpeg cannot.
        """
        before = bisect.bisect_right(self._keys, wanted) - 1
        here = self._here.pts if self._here is not None else self._track.pts[0]
        if before < 0 or self._keys[before] <= here:
            return False
        try:
            self._container.seek(self._keys[before], stream=self._stream, backward=True)
        except av.error.FFmpegError:
            raise _SeekError from None
        self._frames = self._decode(least=self._keys[before])
        self._earlier = self._here = None
        return True

    def _decode(self, least: int | None = None) -> Iterator[_Frame]:
        """Yields frames, without those before `least`: they refer to some before a key frame."""
        track = self._track
        found = _frames(self._container, self._stream, from_key=track.has_keys)
        place = -1  # of the frame before, in joined recordings
        for index, frame in enumerate(found):
            pts = index if track.clock == "index" else _time_on(track.clock, frame)
            if track.joined is not None:
                pts = track.joined.place_of(frame.pts, after=place)
                place = place if pts is None else pts
            if pts is not None and (least is None or pts >= least):
                yield _Frame(pts=pts, frame=frame)

    def _nearest(self, index: int, wanted: int) -> _Frame:
        near = [frame for frame in (self._earlier, self._here) if frame is not None]
        pts = self._track.pts
        at_end = min(index, len(pts) - 1 - index) < NEIGHBOURS_AT_ENDS
        reach = NEIGHBOURS_AT_ENDS if at_end else NEIGHBOURS
        if near:
            best = min(near, key=lambda frame: abs(frame.pts - wanted))
            if abs(bisect.bisect_left(pts, best.pts) - index) <= reach:
                return best
        raise MediaError(
            f"frame {index} of the video cannot be decoded, nor any within {reach} frames of it; "
            "the video is corrupt"
        )
