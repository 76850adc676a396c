"""How Moonshine reads a prompt: a sound, and after the decoder's first token the words with which
the answer begins; mostly there are none."""

from __future__ import annotations

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.encoder_decoder.prompts import BegunByText, start_id


class MoonshinePrompts(BegunByText):
    """See hooks.EncoderPrompts. Raises CheckpointError where nothing says how a decoder begins."""

    item, marker = "sound", "<|audio|>"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(start_id(checkpoint, checkpoint.config))
