"""SoundDecoder: sounds of any form as samples at a rate, files in processes that can die."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import numpy as np

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.media.isolation import Workers

from . import files
from .arrays import Array, as_array, no_samples, too_long
from .options import SoundOptions, sound_options

OVERALL = "max_video_seconds allows"


class OpenSound:
    """A sound that can be read, by one thread at a time. digest: hash of its content. notes: what
    `samples` has left out of a file: other tracks, damaged packets, an end that is missing.

    content: the bytes of a file, or an array.
    """

    def __init__(
        self, content: bytes | Array, digest: str, limits: MediaLimits, workers: Workers | None
    ) -> None:
        self.digest = digest
        self.notes: tuple[str, ...] = content.notes if isinstance(content, Array) else ()
        self._content, self._limits, self._workers = content, limits, workers
        self._kept: dict[Any, np.ndarray] = {}  # what was read last

    def samples(
        self,
        rate: int,
        options: Mapping[str, Any],
        *,
        most: float | None = None,
        because: str = "the model allows",
    ) -> np.ndarray:
        """Returns the samples between start and end of the options, one channel, float32, at
        `rate`.

        most: seconds that the family allows, because: whose limit that is. Raises MediaError for a
        sound that cannot be read, MediaLimitError for one that is too long.
        """
        chosen = sound_options(options)
        if most is None or most > self._limits.max_duration:
            most, because = self._limits.max_duration, OVERALL
        key = rate, chosen, most
        if key not in self._kept:
            read = self._of_file if isinstance(self._content, bytes) else self._of_array
            self._kept = {key: read(rate, chosen, most, because)}
        return self._kept[key]

    def channels(self, rate: int) -> np.ndarray:
        """Returns the samples of each channel of a file, float32 [channels, samples] at `rate`; of
        channels that are all the same, one.

        Raises MediaError for a sound that cannot be read, or is an array, whose channels are mixed
        when it is opened; MediaLimitError for one that is too long, or of more than MOST_APART
        channels.
        """
        if not isinstance(self._content, bytes):
            raise MediaError("only the channels of a file are kept apart, not those of an array")
        most = self._limits.max_duration
        span = {"most": most, "because": OVERALL, "is_apart": True}
        found = self._decoded(self._content, rate, span)
        if len(found) == 1:
            self.notes += ("it has one channel",)
        elif not (found[1:] != found[0]).any():
            self.notes += (f"its {len(found)} channels are the same sound, which is heard once",)
            return found[:1]
        return found

    def _of_file(self, rate: int, chosen: SoundOptions, most: float, because: str) -> np.ndarray:
        assert isinstance(self._content, bytes)
        if chosen.sampling_rate is not None:
            raise MediaError(
                "sampling_rate is an option of sounds that are arrays; a file says its own"
            )
        span = {"start": chosen.start, "end": chosen.end, "most": most, "because": because}
        only: np.ndarray = self._decoded(self._content, rate, span)[0]
        return only

    def _decoded(self, content: bytes, rate: int, span: Mapping[str, Any]) -> np.ndarray:
        """Returns the samples of a file, [channels, samples]. span: the fields of a Span."""
        answers: Iterator[tuple[Mapping[str, Any], np.ndarray | None]]
        if self._workers is None:
            answers = files.decode(content, {}, rate, span)
        else:
            answers = self._workers.decode(
                f"{files.__name__}:decode", content, self._limits, rate=rate, span=span
            )
        pieces, num_channels = list[np.ndarray](), 1
        for fields, piece in answers:
            self.notes = tuple(fields.get("notes", ()))
            if piece is not None and piece.size:
                num_channels = fields["channels"]
                pieces.append(piece.view(np.float32))
        whole = np.concatenate(pieces) if pieces else np.zeros(0, np.float32)
        return np.ascontiguousarray(whole.reshape(-1, num_channels).T)

    def _of_array(self, rate: int, chosen: SoundOptions, most: float, because: str) -> np.ndarray:
        assert isinstance(self._content, Array)
        own = self._content.rate
        if own is not None and chosen.sampling_rate not in (None, own):
            raise MediaError(
                f"the sound says a sampling rate of {own}, its option {chosen.sampling_rate}; "
                "remove one"
            )
        own = own or chosen.sampling_rate
        if own is None:
            raise MediaError(
                "a sound as an array needs its sampling rate: give (array, rate), or the option "
                "sampling_rate"
            )
        samples, length = self._content.samples, len(self._content.samples)
        end = None if chosen.end is None else round(min(chosen.end, length / own) * own)
        first = round(min(chosen.start, length / own) * own)
        if first >= length:
            raise MediaError(
                f"the sound ends after {length / own:.2f} s, before its option start = "
                f"{chosen.start:g}"
            )
        samples = samples[first:end]
        if len(samples) > most * own + 0.5:
            raise too_long(most, because)
        if not len(samples):
            raise no_samples()
        if own == rate:
            return samples
        return _resampled(samples, own, rate)


class SoundDecoder:
    """Opens sounds for a processor. Safe for use from several threads."""

    def __init__(self, workers: Workers | None = None) -> None:
        self._workers = workers or Workers()

    def open(self, source: Any, limits: MediaLimits) -> OpenSound:
        """Opens bytes or an array; decodes no sample of a file yet, in a worker process later
        unless `limits.isolation` is "thread".

        Raises UnsupportedMediaError for another form or format, MediaLimitError for too many bytes,
        MediaError for an array that is no sound.
        """
        workers = None if limits.isolation == "thread" else self._workers
        if isinstance(source, Mapping) and isinstance(source.get("bytes"), bytes):
            source = source["bytes"]  # rows of datasets that are not decoded
        if isinstance(source, (bytes, bytearray, memoryview)):
            blob = bytes(source)
            limits.check_bytes(len(blob), "the sound")
            files.format_of(blob)
            digest = blake2b(blob, digest_size=20).hexdigest()
            return OpenSound(blob, digest, limits, workers)
        array = as_array(source)
        limits.check_bytes(array.samples.nbytes, "the sound's array")
        content = blake2b(f"array\0{array.rate}\0".encode(), digest_size=20)
        content.update(np.ascontiguousarray(array.samples).tobytes())
        return OpenSound(array, content.hexdigest(), limits, workers)

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call of a processor counts as hanging."""
        is_apart = limits.isolation != "thread"
        return self._workers.max_seconds(limits) if is_apart else limits.decode_timeout

    def close(self) -> None:
        """Ends the decoder processes."""
        self._workers.close()


def _resampled(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    from .resampling import resample  # needs PyAV

    return resample(samples, own, rate)
