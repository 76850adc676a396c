"""The sounds of Parakeet: log-mel frames, each channel normed over the sound, of which the encoder
makes one of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mmdeploy_llm_processors.from_transformers.loading import extractor_fields
from mmdeploy_llm_processors.sized import Prepared

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.transformers_parts.fast_conformer import FastConformerSounds, steps_of

LEAST_FRAMES = 2  # of which a deviation can be computed


class ParakeetSounds(FastConformerSounds):
    """Parakeet's feature extractor. Raises CheckpointError where it makes other frames than the
    encoder reads."""

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
        if len(content) < LEAST_FRAMES * self._hop:
            return Prepared(tensors={}, text="")
        return super().prepare(content, settings)
