"""The sounds of Parakeet: log-mel frames, each channel normed over the sound, of which the encoder
makes one of several; and those of Nemotron ASR, which are not normed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_processors.from_transformers.loading import PROCESSOR_FILE, extractor_fields
from mmdeploy_llm_processors.sized import Prepared

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.transformers_parts.fast_conformer import FastConformerSounds, steps_of

LOOKAHEAD = "default_num_lookahead_tokens"


class ParakeetSounds(FastConformerSounds):
    """Parakeet's feature extractor. Raises CheckpointError where it makes other frames than the
    encoder reads."""

    least = 2  # frames, of which a deviation can be computed

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        fields, encoder = extractor_fields(checkpoint) or {}, checkpoint.config.encoder_config
        self._hop = int(fields.get("hop_length", 160))
        found, needed = int(fields.get("feature_size", 80)), encoder.num_mel_bins
        if found != needed:
            raise CheckpointError(
                f"the feature extractor makes {found} mel channels (feature_size), but the encoder "
                f"reads {needed} (num_mel_bins)"
            )
        super().__init__(checkpoint, options)
        each = encoder.subsampling_conv_stride ** steps_of(encoder) * self._hop
        self.most = encoder.max_position_embeddings * each / self.rate
        self.because = "this encoder hears at once, by max_position_embeddings of its config"

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the frames of a sound, or no text for one that is too short."""
        if len(content) < self.least * self._hop:
            return Prepared(tensors={}, text="")
        return super().prepare(content, settings)


class NemotronSounds(ParakeetSounds):
    """The feature extractor of Nemotron ASR, and how many frames the encoder looks ahead: as many
    as transformers' processor says. Raises CheckpointError for less than none."""

    source = "NemotronAsrStreamingFeatureExtractor"
    least = 1

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        own = checkpoint.read_json(PROCESSOR_FILE)
        known = own.get("supported_num_lookahead_tokens") or (None,)
        found = own.get(LOOKAHEAD, known[0])
        encoder = checkpoint.config.encoder_config
        self._lookahead = int(getattr(encoder, LOOKAHEAD) if found is None else found)
        if self._lookahead < 0:
            raise CheckpointError(
                f"{LOOKAHEAD} is {self._lookahead}, must be 0 or more frames that the encoder "
                "looks ahead"
            )
        super().__init__(checkpoint, options)

    @property
    def identity(self) -> str:
        """Returns what shapes a sound, and how far it is looked ahead."""
        return f"{super().identity}\0{self._lookahead}"

    def padding(self, size: int, stride: int) -> int:
        """See FastConformerSounds: no convolution sees what follows its own frames."""
        return size + stride - 2

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the frames of a sound and what the encoder is told with them."""
        made = super().prepare(content, settings)
        told = {"num_lookahead_tokens": torch.tensor(self._lookahead)}
        return replace(made, tensors={**made.tensors, **told}) if made.text else made
