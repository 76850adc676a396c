"""How these models read a prompt: its text begins the answer, as the tokens of Donut's tasks."""

from __future__ import annotations

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.encoder_decoder.prompts import BegunByText, start_id


class PicturePrompts(BegunByText):
    """Raises CheckpointError where nothing says how a decoder begins."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        # As in transformers, whose Donut is asked by tokens of its own in place of the first.
        is_replaced = "donut" in config.encoder.model_type
        super().__init__(start_id(checkpoint, config, config.decoder), is_replaced=is_replaced)
