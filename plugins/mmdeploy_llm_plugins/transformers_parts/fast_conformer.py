"""Parts that models on transformers' FastConformer encoder (ParakeetEncoder) share: sounds that it
hears, and the weights that are not read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from mmdeploy_llm_processors.from_transformers import TransformersSounds

from mmdeploy_llm.hooks import Checkpoint

COUNTERS = r"\.num_batches_tracked$"  # of norms of batches, which only training reads


def steps_of(config: Any) -> int:
    """Returns how many convolutions of the encoder make one frame of several. config: of it."""
    return int(math.log2(config.subsampling_factor))


class FastConformerSounds(TransformersSounds):
    """Log-mel frames by ParakeetFeatureExtractor, of several of which the encoder makes one."""

    source = "ParakeetFeatureExtractor"
    tensors = ("input_features", "attention_mask")
    token = "<|audio|>"
    markers = ("<|audio|>",)

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._encoder = checkpoint.config.encoder_config
        super().__init__(checkpoint, options)

    def padding(self, size: int, stride: int) -> int:
        """Returns how many frames a convolution adds before and after those of a sound."""
        return (size - 1) // 2 * 2

    def num_tokens(self, made: Mapping[str, torch.Tensor]) -> int:
        """Returns how many frames the encoder makes of those that are not masked."""
        count, own = int(made["attention_mask"].sum()), self._encoder
        size, stride = own.subsampling_conv_kernel_size, own.subsampling_conv_stride
        for _ in range(steps_of(own)):
            count = (count + self.padding(size, stride) - size) // stride + 1
        return count
