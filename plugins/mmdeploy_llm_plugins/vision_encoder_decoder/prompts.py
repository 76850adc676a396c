"""How these models read a prompt: its text begins the answer, as the tokens of Donut's tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.encoder_decoder.prompts import BegunByText, start_id

TASK = re.compile(r"<s_[^<>\s]+>")  # as Donut's tasks and fields are written


class PicturePrompts(BegunByText):
    """Raises CheckpointError where nothing says how a decoder begins."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        # As in transformers, whose Donut is asked by tokens of its own in place of the first.
        is_replaced = "donut" in config.encoder.model_type
        super().__init__(start_id(checkpoint, config, config.decoder), is_replaced=is_replaced)

    def begin(
        self, text: str | None, ids: Sequence[int], encode: Callable[[str], list[int]]
    ) -> tuple[int, ...]:
        """See BegunByText. Raises RequestError for a task of Donut that is no token."""
        for name in TASK.findall(text or "") if self._is_replaced else ():
            if len(encode(name)) > 2:  # some tokenizers write a blank before it
                raise RequestError(
                    f"{name:.60} is no token of this checkpoint, which was not trained for it; its "
                    "tokenizer_config.json lists the tokens of its tasks (added_tokens_decoder)"
                )
        return super().begin(text, ids, encode)
