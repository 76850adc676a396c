"""The sounds of Canary and Cohere ASR: mel frames, several of which the encoder makes a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mmdeploy_llm_processors.sized import Prepared

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.transformers_parts.fast_conformer import FastConformerSounds

MIN_FRAMES = 2  # of which the extractor can compute a variance


class CanarySounds(FastConformerSounds):
    """Parakeet's feature extractor, as transformers has it for Canary."""

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the frames of a sound, or no text for one that is too short."""
        made = super().prepare(content, settings)
        is_long = int(made.tensors["attention_mask"].sum()) >= MIN_FRAMES
        return made if is_long else Prepared(tensors={}, text="")


class CohereAsrSounds(CanarySounds):
    """Cohere's feature extractor, which divides a sound beyond `max_audio_clip_s` into several."""

    source = "CohereAsrFeatureExtractor"
    because = "this model hears at once (max_audio_clip_s)"

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        with self._lender.lent() as extractor:
            self.most = float(extractor.max_audio_clip_s)
        self.because = type(self).because
