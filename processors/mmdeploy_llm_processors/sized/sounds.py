"""SoundProcessor: the base of processors of sounds that say how samples are prepared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits
from mmdeploy_llm.media import OpenSound, SoundDecoder

from .processor import SizedProcessor


class SoundProcessor(SizedProcessor):
    """Decodes sounds safely and prepares each as `prepare(samples, settings)` says, where `samples`
    is float32, one channel at `rate`, and the size is their number.

    rate: samples per second that the family takes; set by the subclass.
    most: seconds of one sound that the family takes; None: no limit of its own. because: whose
        limit that is, for the message.
    """

    kind = "audio"
    rate: int
    most: float | None = None
    because: str = "the model allows"

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        self._decoder = SoundDecoder()

    def decode(self, source: Any, limits: MediaLimits) -> OpenSound:
        """Opens the bytes of a file, or an array with its rate."""
        return self._decoder.open(source, limits)

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return self._decoder.max_seconds(limits)

    def close(self) -> None:
        """Ends the decoder processes."""
        self._decoder.close()

    def own_settings(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the options of a sound (start, end, sampling_rate), which `content_of` checks."""
        return {**self.settings, **options}

    def content_of(self, item: OpenSound, settings: Mapping[str, Any]) -> np.ndarray:
        """Returns the samples. Raises MediaError for wrong options or a sound that cannot be read,
        MediaLimitError for one that is too long."""
        own = {name: value for name, value in settings.items() if name not in self.settings}
        return item.samples(self.rate, own, most=self.most, because=self.because)

    def _notes_of(self, item: OpenSound) -> tuple[str, ...]:
        """Returns what is left out of the sound, or filled with silence."""
        return item.notes

    def size_of(self, content: np.ndarray) -> int:
        """Returns the number of samples."""
        return len(content)

    def blank(self, size: int) -> np.ndarray:
        """Returns silence."""
        return np.zeros(size, np.float32)

    def too_small(self, size: int) -> MediaError:
        """Returns the error for a sound that is too short."""
        return MediaError(
            f"the sound is too short for this model: {size / self.rate:.4f} s have no token; give "
            "a longer one, or pad it with silence"
        )

    def longest(self, candidates: Iterable[float]) -> float | None:
        """Returns the first of these seconds beyond which `prepare` drops what follows, found by
        trying it; None: it drops nothing."""
        for seconds in candidates:
            count = round(seconds * self.rate)
            texts = {self.prepare(self.blank(n), self.settings).text for n in (count, 2 * count)}
            if len(texts) == 1:
                return seconds
        return None

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor: embeddings of any length, where the text of a sound is its tokens and
        the same text around them."""
        if grid is not None or options:
            raise MediaError("audio_embeds take no grid and no options")
        text = self.text(self.rate, self.settings)
        tokens = self.token * text.count(self.token)
        start, _, end = text.partition(tokens)
        if f"{start}{tokens}{end}" != text:
            raise MediaError("this model writes other text between a sound's tokens")
        whole = f"{start}{self.token * num_tokens}{end}"
        return MediaInput(
            kind=self.kind, tensors={}, num_tokens=num_tokens, key="", prompt_text=whole
        )
