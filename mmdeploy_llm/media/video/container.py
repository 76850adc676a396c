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
import math
import statistics
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from itertools import pairwise

import av
from av.container import InputContainer
from av.sidedata.sidedata import Type as SideData
from av.video.stream import VideoStream
from PIL import Image

from mmdeploy_llm.errors import (
    MediaError,
    MediaLimitError,
    RequestError,
    UnsupportedMediaError,
)
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.values.first_bytes import HEAD, format_of

from .timeline import UNKNOWN_RATE, Timeline, check_duration, check_size

FORMATS = ("mp4", "matroska", "avi", "flv", "asf", "ogg", "mpeg", "mpegts")
MATRIX = struct.Struct("=9i")  # rows (a, b, u), (c, d, v), (x, y, w); a to d are 16.16 fixed point
UPRIGHT = (1, 0, 0, 1)
TOLERANCE = math.sin(math.radians(1))  # a matrix may be a degree away from a right angle

# Signs of (a, b, c, d) -> what shows the frame so. A stored pixel (x, y) is displayed at
# (a x + c y, b x + d y): ISO/IEC 14496-12, section 6.2.2, and FFmpeg's autorotate.
TRANSPOSES = {
    (-1, 0, 0, 1): Image.Transpose.FLIP_LEFT_RIGHT,
    (-1, 0, 0, -1): Image.Transpose.ROTATE_180,
    (1, 0, 0, -1): Image.Transpose.FLIP_TOP_BOTTOM,
    (0, 1, 1, 0): Image.Transpose.TRANSPOSE,
    (0, 1, -1, 0): Image.Transpose.ROTATE_270,
    (0, -1, -1, 0): Image.Transpose.TRANSVERSE,
    (0, -1, 1, 0): Image.Transpose.ROTATE_90,
}


def upright(frame: av.VideoFrame) -> Image.Image:
    """Returns the frame as it is displayed, in RGB. Other angles than right ones are not turned."""
    image = Image.fromarray(frame.to_ndarray(format="rgb24"))
    turn = TRANSPOSES.get(_signs(frame))
    return image.transpose(turn) if turn is not None else image


def is_sideways(frame: av.VideoFrame) -> bool:
    """Returns whether width and height of the frame change places when it is displayed."""
    return _signs(frame)[0] == 0


def _signs(frame: av.VideoFrame) -> tuple[int, int, int, int]:
    """Returns the signs of (a, b, c, d), each column scaled to length 1 first.

    Without a matrix, with one that is singular, or with one that is no right angle: UPRIGHT.
    """
    data = frame.side_data.get(SideData.DISPLAYMATRIX)
    if data is None or len(bytes(data)) < MATRIX.size:
        return UPRIGHT
    a, b, _, c, d, *_ = MATRIX.unpack_from(bytes(data))
    first, second = math.hypot(a, c), math.hypot(b, d)
    if not first or not second:
        return UPRIGHT
    signs = tuple(map(_sign, (a / first, b / second, c / first, d / second)))
    return signs if signs in TRANSPOSES else UPRIGHT


def _sign(value: float) -> int:
    return 0 if abs(value) < TOLERANCE else int(math.copysign(1, value))


MAX_RATE = 240  # frames per second; times the longest allowed duration it bounds the frames
# Largest distance of a neighbour that replaces a frame that cannot be decoded (FastDeploy's rule).
NEIGHBOURS, NEIGHBOURS_AT_ENDS = 10, 20
# Frame lengths that differ by at most this fraction of their median count as equal: some containers
# round times to milliseconds.
RATE_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """The result of the first pass.

    pts: times of the frames, ascending, in units of time_base. keys: times of the key frames.
    is_numbered: the container lacks the time of some frame, or gives frames those of others, so
    frames are identified by their index and pts are 0, 1, 2, ...
    """

    timeline: Timeline
    pts: Sequence[int]
    keys: Sequence[int]
    is_numbered: bool


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
        self._blob = blob
        self._format = name
        with self._opened() as (container, stream):
            self._track = _survey(container, stream, limits)
        self.timeline = self._track.timeline
        self.digest = blake2b(blob, digest_size=20).hexdigest()

    def read(self, indices: Sequence[int]) -> Iterator[Image.Image]:
        """See OpenVideo."""
        num_done = 0
        try:
            for frame in self._read(indices, self._track.keys):
                yield frame
                num_done += 1
        except _SeekError:  # decode from the beginning, which is slower
            yield from self._read(indices[num_done:], keys=())

    def _read(self, indices: Sequence[int], keys: Sequence[int]) -> Iterator[Image.Image]:
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


def _video_stream(container: InputContainer) -> VideoStream:
    """Returns the first video stream that is not cover art."""
    for stream in container.streams.video:
        if not stream.disposition & av.stream.Disposition.attached_pic:
            if stream.codec_context is None:
                raise UnsupportedMediaError("the video's codec is not known to this FFmpeg")
            stream.thread_count = 1  # the intake already decodes in several threads
            return stream
    kinds: list[str] = sorted({stream.type for stream in container.streams}) or ["nothing"]
    raise UnsupportedMediaError(
        f"the file has no video in it, only {', '.join(kinds)}; give a video, or remove the item"
    )


def _survey(container: InputContainer, stream: VideoStream, limits: MediaLimits) -> Track:
    width, height = stream.codec_context.width, stream.codec_context.height
    if width < 1 or height < 1:
        raise MediaError("the video does not say how large its frames are; it may be truncated")
    check_size(width, height, limits)
    if container.duration:
        check_duration(container.duration / av.time_base, limits)
    packets = _packets(container, stream, int(limits.max_duration * MAX_RATE))
    if not packets:
        raise MediaError("the video holds no frame that can be read; it may be truncated")
    pts: Sequence[int] = sorted({pts for pts, _ in packets if pts is not None})
    has_all = len(pts) == len(packets)
    is_numbered = any(pts is None for pts, _ in packets) or _in_decoding_order(container, stream)
    keys = sorted({pts for pts, is_key in packets if pts is not None and is_key})
    seconds = float(stream.time_base or Fraction(1, 1000))
    if is_numbered and not has_all:
        pts, seconds = range(len(packets)), 1 / _rate(stream)
    times = [(value - pts[0]) * seconds for value in pts]
    if is_numbered:
        pts, keys = range(len(packets)), []
    # The last frame lasts as long as the others.
    last = times[-1] / (len(times) - 1) if len(times) > 1 else 1 / _rate(stream)
    check_duration(times[-1] + last, limits)
    if _is_sideways(container, stream):
        width, height = height, width
    timeline = Timeline(
        width=width,
        height=height,
        times=times,
        duration=times[-1] + last,
        is_constant=_is_constant(times),
    )
    return Track(timeline=timeline, pts=pts, keys=keys, is_numbered=is_numbered)


def _in_decoding_order(container: InputContainer, stream: VideoStream) -> bool:
    """Whether the times of frames are those of the packets that came with them, in the order in
    which they are decoded: AVI has no times of presentation, so FFmpeg counts packets."""
    return container.format.name == "avi" and bool(stream.codec_context.has_b_frames)


def _packets(
    container: InputContainer, stream: VideoStream, max_frames: int
) -> list[tuple[int | None, bool]]:
    """Returns (time, whether it is a key frame) of all packets, one for each frame; for a truncated
    file, of those before its end. Raises MediaLimitError for more than max_frames."""
    found: list[tuple[int | None, bool]] = []
    try:
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                found.append((packet.pts, packet.is_keyframe))
            if len(found) > max_frames:
                raise MediaLimitError(f"the video has more than {max_frames} frames; shorten it")
    except av.error.FFmpegError:
        if not found:
            raise
    return found


def _rate(stream: VideoStream) -> float:
    """Returns the frames per second that the container announces, if plausible, else a default."""
    rate = float(stream.average_rate or stream.guessed_rate or 0)
    return rate if 0 < rate <= MAX_RATE else UNKNOWN_RATE


def _is_constant(times: Sequence[float]) -> bool:
    if len(times) < 3:
        return True
    usual = statistics.median(after - before for before, after in pairwise(times))
    slack = max(RATE_TOLERANCE * usual, 0.002)
    # Frames may be slightly early or late, but must not drift away from an even spacing.
    mean = times[-1] / (len(times) - 1)
    return all(abs(time - index * mean) <= slack for index, time in enumerate(times))


def _is_sideways(container: InputContainer, stream: VideoStream) -> bool:
    """Returns whether frames are rotated by 90 degrees, which only a decoded frame shows."""
    container.seek(0)
    for packet in container.demux(stream):
        for frame in _decoded(packet):
            return is_sideways(frame)
    return False


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
        self._frames = self._decode()
        self._earlier: _Frame | None = None  # the last frame before the wanted one
        self._here: _Frame | None = None  # the frame at or after the wanted one

    def at(self, index: int) -> Image.Image:
        """Returns frame `index`, or the nearest that can be decoded. Raises MediaError when none
        is near, and _SeekError."""
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
        return upright(self._nearest(index, wanted).frame)

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
        self._frames = self._decode()
        self._earlier = self._here = None
        return True

    def _decode(self) -> Iterator[_Frame]:
        index = 0
        try:
            for packet in self._container.demux(self._stream):
                for frame in _decoded(packet):
                    pts = index if self._track.is_numbered else frame.pts
                    index += 1
                    if pts is not None:
                        yield _Frame(pts=pts, frame=frame)
        except av.error.FFmpegError:  # the rest of the file cannot be read
            return

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
