"""How PP-FormulaNet reads a prompt: its text, mostly none, begins the answer."""

from __future__ import annotations

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.encoder_decoder.prompts import BegunByText, start_id


class FormulaPrompts(BegunByText):
    """Raises CheckpointError where nothing says how a decoder begins."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = checkpoint.config
        super().__init__(start_id(checkpoint, config, config.text_config))
