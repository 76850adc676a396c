"""How Moonshine reads a prompt: a sound, and after the decoder's first token the words with which
the answer begins; mostly there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.prompts import BegunByText, one_item, start_id

MARKER = "<|audio|>"


class MoonshinePrompts(BegunByText):
    """See hooks.EncoderPrompts. Raises CheckpointError where nothing says how a decoder begins."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(start_id(checkpoint, checkpoint.config))

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the tokens with which the answer begins, and the sound."""
        item = one_item(media, "sound")
        own = None if text is None else text.replace(MARKER, "")
        return EncoderPrompt(ids=self.begin(own, ids, encode), items=(item,))
