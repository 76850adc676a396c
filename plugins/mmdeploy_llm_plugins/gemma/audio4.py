"""The sounds of Gemma 4: one token for 40 ms, at most 30 seconds, between two marks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.errors import UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.transformers_media.sound.processor import AnyAudioProcessor


class Gemma4AudioProcessor(AnyAudioProcessor):
    """Gemma 4, E2B and E4B. Raises UnsupportedMediaError for the larger models, which have no tower
    for sounds."""

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        if getattr(checkpoint.config, "audio_config", None) is None:
            raise UnsupportedMediaError("it has no tower for sounds; those of E2B and E4B do")
        super().__init__(checkpoint, options)
