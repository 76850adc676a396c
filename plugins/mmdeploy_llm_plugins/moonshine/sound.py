"""The sounds of Moonshine: samples, of which three convolutions make a token for each 24 ms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_processors.from_transformers import TransformersSounds
from mmdeploy_llm_processors.sized import Prepared

from mmdeploy_llm.hooks import Checkpoint

CONVOLUTIONS = ((127, 64), (7, 3), (3, 2))  # size and stride of each kernel


class MoonshineSounds(TransformersSounds):
    """The feature extractor of Wav2Vec2, with which Moonshine's samples stay as they are."""

    source = "Wav2Vec2FeatureExtractor"
    tensors = ("input_values",)
    token = "<|audio|>"
    markers = ("<|audio|>",)

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns how many tokens the encoder makes of the samples."""
        return tokens_of(int(made["input_values"].shape[-1]))

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the samples of a sound, or no text for one that is too short for a token."""
        if tokens_of(len(content)) < 1:
            return Prepared(tensors={}, text="")
        return super().prepare(content, settings)


def tokens_of(count: int) -> int:
    """Returns how many tokens so many samples have, 0 for too few."""
    for size, stride in CONVOLUTIONS:
        count = max(0, (count - size) // stride + 1)
    return count


class MoonshineStreamingSounds(TransformersSounds):
    """The same extractor for Moonshine Streaming: samples, filled with silence to whole frames, of
    which convolutions make a token for four."""

    source = "Wav2Vec2FeatureExtractor"
    tensors = ("input_values", "attention_mask")
    token = "<|audio|>"
    markers = ("<|audio|>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._frame = frame_of(checkpoint.config)
        filled = {"padding": True, "pad_to_multiple_of": self._frame, "return_attention_mask": True}
        self.arguments = filled  # type: ignore[misc]  # the frames are this checkpoint's
        super().__init__(checkpoint, options)
        self.most = longest_of(checkpoint.config) / self.rate
        self.because = "this model has positions for (max_position_embeddings)"

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns how many tokens the encoder makes of the frames."""
        count = int(made["input_values"].shape[-1]) // self._frame
        return ((count - 1) // 2) // 2 + 1

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the samples of a sound, or no text for one that is shorter than a frame."""
        if len(content) < self._frame:
            return Prepared(tensors={}, text="")
        return super().prepare(content, settings)


def frame_of(config: Any) -> int:
    """Returns the samples of a frame of Moonshine Streaming."""
    own = config.encoder_config
    return int(own.sample_rate * own.frame_ms / 1000 + 0.5)


def longest_of(config: Any) -> int:
    """Returns the samples of the longest sound that has positions, of four frames each."""
    return 4 * frame_of(config) * int(config.max_position_embeddings)
