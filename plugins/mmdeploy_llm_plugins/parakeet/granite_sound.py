"""The sounds of Granite Speech 5: logarithms of mel frames with their slopes, two frames in a row.
transformers' feature extractor of it needs torchaudio; this one does the same by torch alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmdeploy_llm_processors.from_transformers.loading import extractor_fields
from mmdeploy_llm_processors.sized import Prepared, SoundProcessor
from torch import Tensor

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.transformers_media.sound.extractors import MelSpectrogram

STACKED = 2  # frames in a row
FIELDS = {  # of the feature extractor, with their defaults
    "sampling_rate": 16000,
    "n_fft": 512,
    "win_length": 400,
    "hop_length": 160,
    "num_mel_bins": 80,
    "delta_win_length": 3,
    "logmel_floor_db": 8.0,
}


def frames_of(config: Any) -> int:
    """Returns how many mel frames the encoder makes one of. config: of the encoder."""
    return int(STACKED * 2 ** len(config.subsample_layers))


class GraniteSpeech5Sounds(SoundProcessor):
    """Computes what GraniteSpeech5FeatureExtractor does of one sound. Raises CheckpointError where
    it makes other frames than the encoder reads."""

    token = "<|audio|>"
    markers = ("<|audio|>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        own, self._encoder = extractor_fields(checkpoint) or {}, checkpoint.config.encoder_config
        self._fields = {name: own.get(name, default) for name, default in FIELDS.items()}
        found, needed = self._fields["num_mel_bins"], self._encoder.num_mel_bins
        if found != needed:
            raise CheckpointError(
                f"the feature extractor makes {found} mel channels (num_mel_bins), but the encoder "
                f"reads {needed}"
            )
        self.rate = int(self._fields["sampling_rate"])
        self._hop = int(self._fields["hop_length"])
        self._mel = MelSpectrogram(
            sample_rate=self.rate,
            n_fft=int(self._fields["n_fft"]),
            win_length=int(self._fields["win_length"]),
            hop_length=self._hop,
            n_mels=int(found),
        )

    @property
    def identity(self) -> str:
        """Returns the fields that shape a sound."""
        return repr(self._fields)

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the frames of a sound, or no text for one that is too short."""
        count = -(-(len(content) // self._hop) // STACKED)
        num_tokens = count // (frames_of(self._encoder) // STACKED)
        if not num_tokens or len(content) <= self._fields["n_fft"] // 2:  # too short to mirror
            return Prepared(tensors={}, text="")
        features = self._features(torch.from_numpy(content), STACKED * count)
        return Prepared(
            tensors={
                "input_features": features,
                "attention_mask": torch.ones(1, count, dtype=torch.bool),
            },
            text=self.token * num_tokens,
            seconds=len(content) / self.rate,
        )

    def _features(self, samples: Tensor, num_frames: int) -> Tensor:
        """Returns [1, frames / 2, 4 * mels]."""
        missing = (num_frames - 1) * self._hop + 1 - len(samples)
        mel = self._mel(F.pad(samples, (0, max(missing, 0)))[None])[..., :num_frames]
        logs = mel.clamp(min=1e-10).log10()
        logs = torch.maximum(logs, logs.amax() - self._fields["logmel_floor_db"]) / 4 + 1
        both = torch.cat([logs, slopes(logs, int(self._fields["delta_win_length"]))], 1)
        return both.transpose(1, 2).reshape(1, num_frames // STACKED, -1)


def slopes(values: Tensor, width: int) -> Tensor:
    """Returns the slope of the line nearest to the values around each, [1, N, frames]; those of
    the ends go on after them."""
    reach = (width - 1) // 2
    offsets = torch.arange(-reach, reach + 1, dtype=values.dtype)
    padded = F.pad(values, (reach, reach), mode="replicate")
    return padded.unfold(-1, 2 * reach + 1, 1) @ (offsets / offsets.square().sum())
