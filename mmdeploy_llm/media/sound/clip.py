"""Makes short clips of sounds for reports, by the decoder that a model's input uses."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from mmdeploy_llm.hooks import MediaLimits

from .decode import SoundDecoder

SECONDS = 10.0
RATE, BIT_RATE = 24_000, 32_000  # 40 kB for a clip, which every browser plays


class Clips:
    """Makes a clip of the beginning of a sound, for any model. Thread-safe. See CanPreview in
    media_loading."""

    kind: ClassVar[str] = "audio"

    def __init__(self, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._decoder = SoundDecoder()

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return self._decoder.max_seconds(limits)

    def decode(self, source: Any, limits: MediaLimits) -> np.ndarray:
        """Returns the first samples. Raises as SoundDecoder does."""
        opened = self._decoder.open(source, limits)
        return opened.samples(RATE, {"end": self._seconds})

    def previews(self, item: np.ndarray, options: Mapping[str, Any]) -> tuple[bytes]:
        """Returns one MP3."""
        return (small_mp3(item),)


def small_mp3(samples: np.ndarray) -> bytes:
    """Makes an MP3 of samples of one channel at RATE."""
    import av  # not before it is needed: reports of pictures do without

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp3") as container:
        stream = container.add_stream("libmp3lame", rate=RATE)
        stream.layout, stream.bit_rate = "mono", BIT_RATE
        planes = np.ascontiguousarray(samples, np.float32)[None]
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout="mono")
        frame.sample_rate, frame.pts = RATE, 0
        for each in (frame, None):
            container.mux(stream.encode(each))
    return buffer.getvalue()
