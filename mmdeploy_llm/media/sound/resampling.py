"""Changes the rate of samples by libswresample, with its defaults: a sinc of 32 taps in a Kaiser
window (beta 9), cut off at 0.97 of the lower Nyquist frequency. torchcodec, which transformers
prefers where it is installed, has the same; soundfile's way, by libsoxr, differs by rounding and
near the cut-off."""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np

FORMAT = "fltp"  # float32, which libswresample computes in
BLOCK = 2**16  # samples that are passed on at once


class Resampler:
    """Resamples one channel. `push` and `flush` yield what is complete."""

    def __init__(self, source_rate: int, rate: int) -> None:
        self._source_rate, self._rate = source_rate, rate
        self._taken = self._given = 0
        self._resampler = (
            None
            if source_rate == rate
            else av.AudioResampler(format=FORMAT, layout="mono", rate=rate)
        )

    def push(self, samples: np.ndarray) -> Iterator[np.ndarray]:
        """Takes float32 samples at the source's rate."""
        self._taken += len(samples)
        if self._resampler is None:
            yield samples
            return
        for begin in range(0, len(samples), BLOCK):
            block = np.ascontiguousarray(samples[None, begin : begin + BLOCK])
            frame = av.AudioFrame.from_ndarray(block, format=FORMAT, layout="mono")
            frame.sample_rate = self._source_rate
            yield from self._resampled(frame)

    def flush(self) -> Iterator[np.ndarray]:
        """Yields the rest, so that all are ceil(samples * rate / source rate), as transformers
        makes them: cut, or filled with silence."""
        if self._resampler is None:
            return
        if self._taken:
            yield from self._resampled(None)
        missing = -(-self._taken * self._rate // self._source_rate) - self._given
        if missing > 0:
            self._given += missing
            yield np.zeros(missing, np.float32)

    def _resampled(self, frame: av.AudioFrame | None) -> Iterator[np.ndarray]:
        assert self._resampler is not None
        for made in self._resampler.resample(frame):
            samples = made.to_ndarray()[0]
            most = -(-self._taken * self._rate // self._source_rate)
            samples = samples[: most - self._given]
            self._given += len(samples)
            if len(samples):
                yield samples


def resample(samples: np.ndarray, source_rate: int, rate: int) -> np.ndarray:
    """Returns float32 samples at another rate."""
    resampler = Resampler(source_rate, rate)
    pieces = [*resampler.push(samples), *resampler.flush()]
    return np.concatenate(pieces) if pieces else samples[:0]
