"""How BLIP reads a prompt: its text, which may be none, begins the caption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.prompts import BegunByText


class BlipPrompts(BegunByText):
    """Ends answers at [SEP], as transformers' generate does, whatever the checkpoint's files name
    as their end."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        text = checkpoint.config.text_config
        super().__init__(text.bos_token_id)
        self._ends: tuple[int, ...] = () if text.sep_token_id is None else (text.sep_token_id,)

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the tokens with which the caption begins, and the picture."""
        return replace(super().divide(text, ids, media, encode), end_ids=self._ends)
