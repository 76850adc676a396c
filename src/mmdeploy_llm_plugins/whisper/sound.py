"""The sounds of Whisper: always half a minute of mel frames, the rest is silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_processors.from_transformers import TransformersSounds
from mmdeploy_llm_processors.sized import Prepared


class WhisperSounds(TransformersSounds):
    """Whisper's feature extractor. Raises CheckpointError where it makes another number of frames
    than the encoder reads."""

    source = "WhisperFeatureExtractor"
    token = "<|audio|>"
    markers = ("<|audio|>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        found, needed = self.text(1, self.settings), checkpoint.config.max_source_positions
        if found.count(self.token) != needed:
            raise CheckpointError(
                f"the feature extractor makes {2 * found.count(self.token)} frames of a sound "
                f"(chunk_length, hop_length), but the encoder reads {2 * needed} "
                f"(max_source_positions = {needed})"
            )

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns half the number of frames: the encoder's second convolution takes every other."""
        return int(made["input_features"].shape[-1]) // 2

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the frames of a sound, or no text for one without a sample."""
        if not len(content):
            return Prepared(tensors={}, text="")
        return super().prepare(content, settings)

    def text(self, size: int, settings: Mapping[str, Any]) -> str:
        """Returns the text of a sound, which is the same for all lengths."""
        return super().text(min(size, 1), settings)
