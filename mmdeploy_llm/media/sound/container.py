"""Reads the sound of files, through PyAV (FFmpeg): sound files, and videos with a sound track.

Nothing that a header says about the length is believed, since recorders that write to a pipe do not
know it: a file is decoded until it ends, or is longer than allowed. Where samples are missing or
begin late, silence stands, see clock.py. What is missing of the length that a file states, and what
else is left out or filled, is noted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import av
import numpy as np
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.stream import Disposition

from mmdeploy_llm.errors import MediaError, MediaLimitError, RequestError, UnsupportedMediaError
from mmdeploy_llm.media.sound.headers.chunks import Link
from mmdeploy_llm.media.sound.headers.lengths import parts_of, stated_seconds
from mmdeploy_llm.media.sound.headers.tally import Tally
from mmdeploy_llm.media.tracks import is_fragmented

from .arrays import check_values, no_samples, too_long
from .clock import NEW_CLOCK, RESTARTS, WITH_CLOCK, WITHOUT_CLOCK_IN_OGG, Clock
from .mixing import BLOCK, Apart, Mixer
from .options import RATES
from .resampling import Resampler

SILENT = 2**20  # samples of silence that are made at once
# Formats of decoded samples -> (what a whole number is divided by, its middle).
SCALES = {
    "u8": (128.0, 128.0),
    "s16": (2.0**15, 0.0),
    "s32": (2.0**31, 0.0),
    "s64": (2.0**63, 0.0),
    "flt": (1.0, 0.0),
    "dbl": (1.0, 0.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The part of a sound that is read, in seconds. most: the longest that is allowed; because: by
    whom, for the message. is_apart: whether its channels are kept apart, not mixed."""

    start: float = 0.0
    end: float | None = None
    most: float
    because: str
    is_apart: bool = False


def read_container(
    blob: bytes, name: str, rate: int, span: Span, notes: list[str] | None = None
) -> Iterator[np.ndarray]:
    """Yields the samples of a part of a file, [channels, samples] at `rate`: one channel, or as
    many as there are where the span wants them apart. name: FFmpeg's of its format. notes: gets
    what was left out, where the file is read to its end.

    Raises MediaError for a file that cannot be read, MediaLimitError for a part that is too long,
    UnsupportedMediaError for one without sound.
    """
    read = Tally(name=name)
    mixer = Apart() if span.is_apart else Mixer()
    yield from _resampled(_cut(_taken(blob, name, read, mixer, span.most), span), rate)
    if notes is not None:
        notes += (*mixer.notes(), *(read.notes() if span.end is None else ()))


@contextmanager
def _opened(blob: bytes, name: str) -> Iterator[tuple[InputContainer, AudioStream]]:
    """Opens the file; raises FFmpeg's errors as MediaError without their untrusted messages."""
    try:
        with av.open(
            io.BytesIO(blob),
            format=name,
            metadata_errors="replace",
            options={"protocol_whitelist": ""},
        ) as container:
            yield container, _stream(container)
    except RequestError:
        raise
    except (av.error.FFmpegError, ValueError, ArithmeticError, EOFError) as error:
        # The bytes are in memory: FFmpeg's PermissionError says nothing about a file.
        what = "FFmpegError" if isinstance(error, PermissionError) else type(error).__name__
        raise MediaError(
            f"the {name} sound is corrupt or truncated ({what} while reading it)"
        ) from None
    except MemoryError:
        raise MediaLimitError("there is not enough memory to decode the sound; cut it") from None


def _stream(container: InputContainer) -> AudioStream:
    """Returns the sound track that FFmpeg finds best: the default one of several languages."""
    found = container.streams.best("audio")
    if found is None:
        kinds: list[str] = sorted({stream.type for stream in container.streams}) or ["nothing"]
        if "audio" in kinds:
            raise MediaError("the file's sound track says no channels or rate that can be used")
        raise UnsupportedMediaError(
            f"the file has no sound in it, only {', '.join(kinds)}; give a sound, or remove the "
            "item"
        )
    assert isinstance(found, AudioStream)
    if found.codec_context is None:
        raise UnsupportedMediaError("the sound's codec is not known to this FFmpeg")
    found.codec_context.thread_count = 1  # the intake already decodes in several threads
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Block:
    """Samples [channels, samples], float32, at a rate."""

    samples: np.ndarray
    rate: int


def _taken(
    blob: bytes, name: str, read: Tally, mixer: Mixer | Apart, most: float
) -> Iterator[_Block]:
    """Yields decoded blocks. Raises MediaError where more than a few packets are damaged."""
    for link in parts_of(blob, name):
        read.num_files += 1
        read.num_damaged += link.num_lost
        left = sys.maxsize if link.num_samples is None else link.num_samples
        with _opened(link.blob, name) as (container, stream):
            _note(read, link, container, stream)
            for channels, rate in _joined(_timed(container, stream, read, link.blob, most)):
                if samples := min(channels.shape[1], left):
                    left -= samples
                    block = _Block(samples=mixer.taken(channels)[:, :samples], rate=rate)
                    read.seconds += samples / block.rate
                    yield block
    if read.is_corrupt:
        raise MediaError(
            f"the sound is corrupt: {read.num_damaged} of its {read.num_packets} packets cannot be "
            "decoded"
        )


Channels = tuple[np.ndarray, int]  # [channels, samples] float32, samples per second


def _joined(pieces: Iterator[Channels]) -> Iterator[Channels]:
    """Yields pieces of BLOCK samples and more, where channels and rate stay the same."""
    held: list[np.ndarray] = []
    rate = 0
    for piece, own in pieces:
        if held and (own != rate or len(piece) != len(held[0])):
            yield np.concatenate(held, axis=1), rate
            held = []
        held.append(piece)
        rate = own
        if sum(each.shape[1] for each in held) >= BLOCK:
            yield (np.concatenate(held, axis=1) if len(held) > 1 else piece), rate
            held = []
    if held:
        yield np.concatenate(held, axis=1), rate


def _timed(
    container: InputContainer, stream: AudioStream, read: Tally, blob: bytes, most: float
) -> Iterator[Channels]:
    """Yields the samples of frames, and silence where the times of a file say that none are."""
    codec = stream.codec_context.name
    has_clock = read.name in WITH_CLOCK and not (
        read.name == "ogg" and codec in WITHOUT_CLOCK_IN_OGG
    )
    clock: Clock | None = None
    begin = read.position + read.lost
    for frame in _frames(container, stream, read):
        channels, rate = _channels(frame), _rate(frame)
        time = frame.time if has_clock else read.lost_until(frame.samples / rate)
        if clock is None and time is not None:
            zero = _zero(container, read.name, blob, time) if has_clock else begin
            clock = Clock(zero=zero, most=NEW_CLOCK if read.name in RESTARTS else most)
            read.clocks.append(clock)
        if clock is not None:
            silence = clock.silence_before(time) if time is not None else 0.0
            yield from _silence(round(silence * rate), len(channels), rate)
            clock.heard(frame.samples / rate)
        yield channels, rate


def _zero(container: InputContainer, name: str, blob: bytes, first: float) -> float:
    """Returns the time in the file at which players begin: where its picture or its sound begins.

    A film in MP4 has a clock of its own, which begins at 0, unless it is a fragment of one. first:
    the time of the first sample."""
    if name == "mp4" and not is_fragmented(blob):
        return min(0.0, first)
    begins = (
        float(picture.start_time * picture.time_base)
        for picture in container.streams.video
        if picture.start_time is not None
        and picture.time_base is not None
        and not picture.disposition & Disposition.attached_pic
    )
    return min(first, *begins) if container.streams.video else first


def _silence(num_samples: int, num_channels: int, rate: int) -> Iterator[Channels]:
    for begin in range(0, num_samples, SILENT):
        yield np.zeros((num_channels, min(SILENT, num_samples - begin)), np.float32), rate


def _note(read: Tally, link: Link, container: InputContainer, stream: AudioStream) -> None:
    """Adds what the header of a file, or of one link of it, says."""
    own = float((stream.duration or 0) * (stream.time_base or 0))
    tracks = [*container.streams.audio]
    is_alone = len(container.streams) == 1  # a picture may be longer than its sound
    whole = (container.duration or 0) / av.time_base if is_alone else 0.0
    read.stated += stated_seconds(link, read.name, own, whole)
    languages = (track.language or "und" for track in tracks)
    read.share = link.share
    read.tracks, read.track = tuple(languages), tracks.index(stream)


def _rate(frame: av.AudioFrame) -> int:
    """Returns the samples per second. Raises MediaError for what no sound has, which would cost
    minutes or gigabytes to resample."""
    rate: int = frame.sample_rate
    if rate not in RATES:
        raise MediaError(
            f"the sound says a sampling rate of {rate}, which must be {RATES[0]} to "
            f"{RATES[-1]}; its header is damaged"
        )
    return rate


def _frames(container: InputContainer, stream: AudioStream, read: Tally) -> Iterator[av.AudioFrame]:
    try:
        for packet in container.demux(stream):
            try:
                yield from packet.decode()
                read.num_whole += 1
            except av.error.FFmpegError:
                read.num_damaged += 1
                read.lost += float((packet.duration or 0) * (packet.time_base or 0))
    except av.error.FFmpegError:  # a file that is cut off: what came before is whole
        if not read.num_whole:
            raise


def _channels(frame: av.AudioFrame) -> np.ndarray:
    """Returns the samples of a frame as soundfile has them, float32 [channels, samples]."""
    name = frame.format.name.removesuffix("p")
    if name not in SCALES:
        raise UnsupportedMediaError(f"samples of the format {name} are not known here; convert it")
    values = frame.to_ndarray()
    values = values if frame.format.is_planar else values.reshape(frame.samples, -1).T
    scale, middle = SCALES[name]
    floats = np.ascontiguousarray(values, dtype=np.float32)
    if scale != 1.0:
        floats = (floats - np.float32(middle)) / np.float32(scale)
    else:
        check_values(floats)
    return floats


def _cut(blocks: Iterator[_Block], span: Span) -> Iterator[_Block]:
    """Yields what lies within the span. Raises for a sound that is too long, ends before the span
    begins, or has no samples."""
    seconds = taken = 0.0
    for block in blocks:
        first = max(0, round((span.start - seconds) * block.rate))
        last = block.samples.shape[1]
        if span.end is not None:
            last = min(last, max(0, round((span.end - seconds) * block.rate)))
        seconds += block.samples.shape[1] / block.rate
        if last > first:
            taken += (last - first) / block.rate
            if taken > span.most + 0.5 / block.rate:
                raise too_long(span.most, span.because)
            yield _Block(samples=block.samples[:, first:last], rate=block.rate)
        if span.end is not None and seconds >= span.end:
            break
    if not taken:
        raise no_samples() if not seconds else after_end(span.start, seconds)


def after_end(start: float, seconds: float) -> MediaError:
    """Returns the error of a start after the end."""
    return MediaError(f"the sound ends after {seconds:.2f} s, before its option start = {start:g}")


def _resampled(blocks: Iterator[_Block], rate: int) -> Iterator[np.ndarray]:
    """Yields samples at `rate`, [channels, samples]. The rate of a file may change: tracks that
    follow one another."""
    resamplers: list[Resampler] = []  # one for each channel
    source_rate = 0
    for block in blocks:
        if not resamplers or block.rate != source_rate:
            yield from _side_by_side(one.flush() for one in resamplers)
            source_rate = block.rate
            resamplers = [Resampler(source_rate, rate) for _ in block.samples]
        yield from _side_by_side(
            one.push(own) for one, own in zip(resamplers, block.samples, strict=True)
        )
    yield from _side_by_side(one.flush() for one in resamplers)


def _side_by_side(channels: Iterable[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yields pieces [channels, samples] of the pieces of each channel, which are equally long."""
    for pieces in zip(*channels, strict=True):
        yield pieces[0][None] if len(pieces) == 1 else np.stack(pieces)
