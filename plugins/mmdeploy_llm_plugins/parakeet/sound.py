"""The sounds of Parakeet: log-mel frames, each channel normed over the sound, of which the encoder
makes one of several."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_processors.from_transformers import TransformersSounds
from mmdeploy_llm_processors.sized import Prepared

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint

PROCESSOR, EXTRACTOR = "processor_config.json", "feature_extractor"
LEAST_FRAMES = 2  # of which a deviation can be computed


def fields_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Returns the fields of the feature extractor, wherever the checkpoint has them."""
    return {**checkpoint.preprocessor, **checkpoint.read_json(PROCESSOR).get(EXTRACTOR, {})}


def steps_of(config: Any) -> int:
    """Returns how many times the encoder's convolutions take every so manieth frame. config: of the
    encoder."""
    return int(math.log2(config.subsampling_factor))


class ParakeetSounds(TransformersSounds):
    """Parakeet's feature extractor. Raises CheckpointError where it makes other frames than the
    encoder reads."""

    source = "ParakeetFeatureExtractor"
    tensors = ("input_features", "attention_mask")
    token = "<|audio|>"
    markers = ("<|audio|>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._encoder, fields = checkpoint.config.encoder_config, fields_of(checkpoint)
        self._hop = int(fields.get("hop_length", 160))
        found, needed = int(fields.get("feature_size", 80)), self._encoder.num_mel_bins
        if found != needed:
            raise CheckpointError(
                f"the feature extractor makes {found} mel channels (feature_size), but the encoder "
                f"reads {needed} (num_mel_bins)"
            )
        super().__init__(checkpoint, options)
        each = self._encoder.subsampling_conv_stride ** steps_of(self._encoder) * self._hop
        self.most = self._encoder.max_position_embeddings * each / self.rate
        self.because = "this encoder hears at once, by max_position_embeddings of its config"

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns how many frames the encoder makes."""
        count, own = int(made["attention_mask"].sum()), self._encoder
        size, stride = own.subsampling_conv_kernel_size, own.subsampling_conv_stride
        for _ in range(steps_of(own)):
            count = (count + (size - 1) // 2 * 2 - size) // stride + 1
        return count

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the frames of a sound, or no text for one that is too short."""
        if len(content) < LEAST_FRAMES * self._hop:
            return Prepared(tensors={}, text="")
        return super().prepare(content, settings)
