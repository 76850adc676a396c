"""The sounds of Canary and Cohere ASR: mel frames, several of which the encoder makes a token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_processors.from_transformers import TransformersSounds
from mmdeploy_llm_processors.sized import Prepared

from mmdeploy_llm.hooks import Checkpoint

MIN_FRAMES = 2  # of which the extractor can compute a variance


class CanarySounds(TransformersSounds):
    """Parakeet's feature extractor, as transformers has it for Canary."""

    source = "ParakeetFeatureExtractor"
    tensors = ("input_features", "attention_mask")
    token = "<|audio|>"
    markers = ("<|audio|>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._encoder = checkpoint.config.encoder_config
        super().__init__(checkpoint, options)

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns how many tokens the encoder makes of the frames that are not masked."""
        own, count = self._encoder, int(made["attention_mask"].sum())
        size = own.subsampling_conv_kernel_size
        added = (size - 1) // 2 * 2 - size
        for _ in range(int(math.log2(own.subsampling_factor))):
            count = (count + added) // own.subsampling_conv_stride + 1
        return count

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the frames of a sound, or no text for one that is too short."""
        made = super().prepare(content, settings)
        is_long = int(made.tensors["attention_mask"].sum()) >= MIN_FRAMES
        return made if is_long else Prepared(tensors={}, text="")


class CohereAsrSounds(CanarySounds):
    """Cohere's feature extractor, which divides a sound beyond `max_audio_clip_s` into several."""

    source = "CohereAsrFeatureExtractor"
    because = "this model hears at once (max_audio_clip_s)"

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        with self._lender.lent() as extractor:
            self.most = float(extractor.max_audio_clip_s)
        self.because = type(self).because
