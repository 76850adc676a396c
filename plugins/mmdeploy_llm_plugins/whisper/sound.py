"""The sounds of Whisper: always half a minute of mel frames, the rest is silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_processors.from_transformers import TransformersSounds
from mmdeploy_llm_processors.sized import Prepared

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint, MediaInput

PROCESSOR, EXTRACTOR = "processor_config.json", "feature_extractor"


class WhisperSounds(TransformersSounds):
    """Whisper's feature extractor. Raises CheckpointError where it makes another number of frames
    than the encoder reads."""

    source = "WhisperFeatureExtractor"
    token = "<|audio|>"
    markers = ("<|audio|>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        fields = {**checkpoint.preprocessor, **checkpoint.read_json(PROCESSOR).get(EXTRACTOR, {})}
        self._least = int(fields.get("n_fft", 400))  # samples of a window
        super().__init__(checkpoint, options)
        found = self.text(self._least, self.settings).count(self.token)
        needed = checkpoint.config.max_source_positions
        if found != needed:
            raise CheckpointError(
                f"the feature extractor makes {2 * found} frames of a sound (chunk_length, "
                f"hop_length), but the encoder reads {2 * needed} (max_source_positions = {needed})"
            )

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns half the number of frames: the encoder's second convolution takes every other."""
        return int(made["input_features"].shape[-1]) // 2

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the frames of a sound, or no text for one that is shorter than a window."""
        if len(content) < self._least:
            return Prepared(tensors={}, text="")
        return super().prepare(content, settings)

    def text(self, size: int, settings: Mapping[str, Any]) -> str:
        """Returns the text of a sound, which is the same for all lengths."""
        return super().text(min(size, self._least), settings)

    def largest(self, max_tokens: int) -> MediaInput | None:
        """Returns silence: all sounds have the same size."""
        made = self.processed(self.blank(self._least), "", self.settings)
        return made if made.num_tokens <= max_tokens else None
