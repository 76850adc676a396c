"""Granite Speech 5: CTC on a conformer whose frames attend within blocks, which says words in its
middle and hears them in the layers after it."""

from __future__ import annotations

from typing import Any

from transformers.models.granite_speech5.modeling_granite_speech5 import GraniteSpeech5Encoder

from mmdeploy_llm.layers import Linear

from .aligned import AlignedLM
from .model import ParakeetForCTC


class GraniteSpeech5ForCTC(ParakeetForCTC):
    """transformers' class of the same name."""

    tower = GraniteSpeech5Encoder

    def __init__(self, config: Any) -> None:
        size = config.encoder_config.hidden_size
        AlignedLM.__init__(self, config, size, config.pad_token_id)
        is_tied = config.tie_word_embeddings
        if is_tied:  # some files store it a second time
            self.ignored = (*self.ignored, r"^ctc_head\.")
        self.ctc_head = (
            self.encoder.inner.out if is_tied else Linear(size, config.vocab_size, bias=True)
        )
        self.map_weights()
