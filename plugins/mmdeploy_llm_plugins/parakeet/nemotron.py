"""Nemotron ASR: RNN-T on a FastConformer that sees whole pieces of frames, and a few ahead. The one
of several languages (3.5) is told which by a vector beside each frame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.nemotron_asr_streaming.modeling_nemotron_asr_streaming import (
    NemotronAsrStreamingEncoder,
)

from mmdeploy_llm.hooks import MediaInput
from mmdeploy_llm.layers import Linear

from .model import ParakeetForRNNT
from .prompts import PROMPT_ID


class NemotronAsrStreamingForRNNT(ParakeetForRNNT):
    """transformers' class of the same name, for whole sounds."""

    tower = NemotronAsrStreamingEncoder

    def arguments(self, item: MediaInput) -> Mapping[str, Any]:
        """Returns how many frames the encoder looks ahead."""
        return {"num_lookahead_tokens": int(item.tensors["num_lookahead_tokens"])}


class PromptProjector(nn.Module):
    """Joins frames [L, encoder size] and the language."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        size, middle = config.encoder_config.hidden_size, config.prompt_intermediate_size
        self.num_prompts = config.num_prompts
        self.linear_1 = Linear(size + self.num_prompts, middle, bias=True)
        self.linear_2 = Linear(middle, size, bias=True)

    def forward(self, frames: Tensor, prompt_id: int) -> Tensor:
        """Returns frames of the same size."""
        told = frames.new_zeros((len(frames), self.num_prompts))
        told[:, prompt_id] = 1
        out: Tensor = self.linear_2(self.linear_1(torch.cat([frames, told], -1)).relu())
        return out


class Nemotron3_5AsrForRNNT(NemotronAsrStreamingForRNNT):
    """transformers' class of the same name, for whole sounds."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._default = int(config.default_prompt_id)
        self.prompt_projector = PromptProjector(config)
        self.map_weights()

    def heard(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Returns the frames of each sound with its language, [L, encoder size]."""
        asked = [int(item.tensors.get(PROMPT_ID, self._default)) for item in items]
        pairs = zip(super().heard(items), asked, strict=True)
        return [self.prompt_projector(own, prompt_id) for own, prompt_id in pairs]
