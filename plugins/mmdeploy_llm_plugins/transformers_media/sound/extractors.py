"""Feature extractors of transformers that need torchaudio, by torch alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
from transformers.feature_extraction_utils import BatchFeature


class MelSpectrogram:
    """Computes what torchaudio.transforms.MelSpectrogram does with its defaults: power, centred
    frames in a Hann window, triangles on the HTK scale without norm."""

    def __init__(
        self, *, sample_rate: int, n_fft: int, win_length: int, hop_length: int, n_mels: int
    ) -> None:
        self._n_fft, self._win_length, self._hop_length = n_fft, win_length, hop_length
        self._window = torch.hann_window(win_length)
        self._banks = _banks(n_fft // 2 + 1, n_mels, sample_rate)

    def __call__(self, audio: Tensor) -> Tensor:
        """Computes [N, samples] -> [N, mels, frames]."""
        found = torch.stft(
            audio,
            self._n_fft,
            self._hop_length,
            self._win_length,
            self._window,
            center=True,
            pad_mode="reflect",
            normalized=False,
            onesided=True,
            return_complex=True,
        )
        power = found.abs().pow(2.0)
        return torch.matmul(power.transpose(-1, -2), self._banks).transpose(-1, -2)


def _banks(num_bins: int, n_mels: int, sample_rate: int) -> Tensor:
    """Returns the triangles, [bins, mels]."""
    bins = torch.linspace(0, sample_rate // 2, num_bins)
    top = 2595.0 * math.log10(1.0 + sample_rate / 2.0 / 700.0)
    points = 700.0 * (10.0 ** (torch.linspace(0.0, top, n_mels + 2) / 2595.0) - 1.0)
    widths = points[1:] - points[:-1]
    slopes = points.unsqueeze(0) - bins.unsqueeze(1)
    down, up = -slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]
    return torch.clamp(torch.min(down, up), min=0.0)


class GraniteSpeechFeatureExtractor(SequenceFeatureExtractor):  # type: ignore[misc]
    """Computes what transformers' class of this name does of one sound: the logarithms of two
    neighbouring frames in a row, and how many tokens the projector makes of them."""

    model_input_names = ("input_features",)

    def __init__(
        self,
        sampling_rate: int = 16000,
        n_fft: int = 512,
        win_length: int = 400,
        hop_length: int = 160,
        n_mels: int = 80,
        projector_window_size: int = 15,
        projector_downsample_rate: int = 5,
        padding_value: float = 0.0,
        **kwargs: Any,
    ) -> None:
        mels = kwargs.pop("feature_size", None) or n_mels
        kwargs.pop("mel_filters", None)
        super().__init__(mels, sampling_rate, padding_value, **kwargs)
        self.melspec_kwargs = {
            "sample_rate": sampling_rate,
            "n_fft": n_fft,
            "win_length": win_length,
            "hop_length": hop_length,
            "n_mels": mels,
        }
        self.projector_window_size = projector_window_size
        self.projector_downsample_rate = projector_downsample_rate
        self._spectrogram = MelSpectrogram(**self.melspec_kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Leaves out what is computed."""
        return {name: value for name, value in super().to_dict().items() if name[0] != "_"}

    def __call__(self, audios: Sequence[np.ndarray], device: object = None) -> BatchFeature:
        """Processes one sound of float32 samples."""
        (samples,) = audios
        if len(samples) <= self.melspec_kwargs["n_fft"] // 2:  # too short to be mirrored
            return self._made(torch.zeros(1, 0, 2 * self.feature_size), 0)
        mel = self._spectrogram(torch.from_numpy(samples).unsqueeze(0))
        logs = mel.transpose(-1, -2).clip_(min=1e-10).log10_()
        highest = logs.amax(dim=(-2, -1), keepdim=True)
        logs = torch.maximum(logs, highest - 8.0).div_(4).add_(1)
        logs = logs[:, : logs.shape[1] // 2 * 2]
        features = logs.reshape(1, -1, 2 * logs.shape[-1])
        frames = (len(samples) // self.melspec_kwargs["hop_length"] + 1) // 2
        per_window = self.projector_window_size // self.projector_downsample_rate
        count = math.ceil(frames / self.projector_window_size) * per_window
        return self._made(features, count)

    def _made(self, features: Tensor, count: int) -> BatchFeature:
        return BatchFeature(
            {
                "input_features": features,
                "audio_embed_sizes": [count],
                "input_features_mask": torch.ones(1, count, dtype=torch.bool),
            }
        )
