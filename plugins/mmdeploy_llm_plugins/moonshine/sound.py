"""The sounds of Moonshine: samples, of which three convolutions make a token for each 24 ms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmdeploy_llm_processors.from_transformers import TransformersSounds
from mmdeploy_llm_processors.sized import Prepared

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
