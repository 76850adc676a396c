"""How these models read a prompt: its text begins the answer, as the tokens of Donut's tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmdeploy_llm.hooks import Checkpoint, EncoderPrompt, MediaInput
from mmdeploy_llm_plugins.encoder_decoder.prompts import one_item, start_id

MARKER = "<image>"


class PicturePrompts:
    """See hooks.EncoderPrompts. Raises CheckpointError where nothing says how a decoder begins."""

    has_places = False

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        self._start = start_id(checkpoint, config, config.decoder)
        # As in transformers, whose Donut is asked by tokens of its own in place of the first.
        self._is_replaced = "donut" in config.encoder.model_type

    def divide(
        self,
        text: str | None,
        ids: Sequence[int],
        media: Sequence[MediaInput],
        encode: Callable[[str], list[int]],
    ) -> EncoderPrompt:
        """Returns the tokens with which the answer begins, and the picture."""
        item = one_item(media, "image")
        own = ids if text is None else encode(text.replace(MARKER, "").strip())
        is_whole = bool(own) and (self._is_replaced or own[0] == self._start)
        begin = own if is_whole else (self._start, *own)
        return EncoderPrompt(ids=tuple(begin), items=(item,))
