"""The image processor of T5Gemma 2, which is Gemma 3's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.gemma.image3 import Gemma3ImageProcessor


class T5GemmaImages(Gemma3ImageProcessor):
    """Reads the sizes of the tower where the encoder's config has them."""

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(replace(checkpoint, config=checkpoint.config.encoder), options)
