"""VoiceDetector: finds the stretches of a sound in which somebody speaks.

The detector is Silero VAD of the package silero-vad, whose wheel (11 MB) holds the model and needs
nothing but torch and packaging, which are there: its TorchScript, not its ONNX file, as that would
need onnxruntime too. It gives a probability for every 32 ms; the package's own rule makes stretches
of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mmdeploy_llm.errors import ConfigError

RATE = 16_000  # samples per second
FRAME = 512  # samples of which the model says one probability
NOT_INSTALLED = (
    'vad needs a detector of voices, which is not installed (pip install "mmdeploy-llm[vad]")'
)
THRESHOLD = 0.5  # probability from which on somebody speaks; Silero's default
SHORTEST = 100  # ms of a stretch: Silero's 250 would leave a short "yes" out
LOUD = 0.5  # of the largest sample that the detector gets: it misses words that are 40 dB softer
MOST_GAIN = 100.0  # by which soft sounds are made louder for it
PAUSE = 500  # ms of silence that end a stretch: more than pauses between words


class FindsVoices(Protocol):
    """Finds speech in sounds. rate: samples per second that it hears."""

    rate: int

    def stretches(self, samples: np.ndarray) -> Sequence[tuple[int, int]]:
        """Returns the stretches in which somebody speaks, in order: their first samples and their
        ends; none overlaps another one. samples: float32 [samples] of one channel."""


class VoiceDetector:
    """Finds speech with Silero VAD, see FindsVoices. Raises ConfigError if it is not installed. Not
    thread-safe."""

    rate = RATE

    def __init__(self) -> None:
        import torch

        num_threads = torch.get_num_threads()
        try:
            import silero_vad
        except ImportError:
            raise ConfigError(NOT_INSTALLED) from None
        finally:
            torch.set_num_threads(num_threads)  # the import sets it to one, for everything
        self._stretches_of: Any = silero_vad.get_speech_timestamps_from_probs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of TorchScript, by torch
            self._model: Any = silero_vad.load_silero_vad()

    def stretches(self, samples: np.ndarray) -> list[tuple[int, int]]:
        """See FindsVoices. Takes a fiftieth of the time that the sound does, on one core."""
        import torch

        loudest = float(np.abs(samples).max(initial=LOUD / MOST_GAIN))
        louder = samples * np.float32(max(LOUD / loudest, 1.0))
        missing = -len(samples) % FRAME
        frames = torch.from_numpy(np.pad(louder, (0, missing)).reshape(-1, FRAME))
        with torch.inference_mode():
            self._model.reset_states()
            # Frame by frame and not all at once, so that Ctrl-C is heard within long sounds.
            probabilities = [self._model(frame, RATE).item() for frame in frames]
        found = self._stretches_of(
            probabilities,
            sampling_rate=RATE,
            threshold=THRESHOLD,
            min_speech_duration_ms=SHORTEST,
            min_silence_duration_ms=PAUSE,
            speech_pad_ms=0,
            audio_length_samples=len(samples),
        )
        return [(int(one["start"]), int(one["end"])) for one in found]
