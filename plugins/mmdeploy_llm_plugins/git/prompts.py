"""How GIT reads a prompt: its text, after the token that begins every text, begins the answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmdeploy_llm.errors import CheckpointError
from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.prompts import BegunByText, setting


class GitPrompts(BegunByText):
    """Raises CheckpointError where nothing says how a text begins. A prompt may have no picture."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        begin = setting(checkpoint, checkpoint.config, "bos_token_id")
        if not isinstance(begin, int):
            raise CheckpointError(
                "neither generation_config.json nor config.json has bos_token_id, with which every "
                "text begins"
            )
        super().__init__(begin)

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the tokens with which the answer begins, and the picture."""
        if media:
            return super().divide(text, ids, media, encode)
        return EncoderPrompt(ids=self.begin(text, ids, encode), items=())

    def begin(
        self, text: str | None, ids: Sequence[int], encode: Callable[[str], list[int]]
    ) -> tuple[int, ...]:
        """Returns the first tokens; ids are taken as they are, as transformers takes them."""
        return tuple(ids) if text is None and ids else super().begin(text, ids, encode)
