"""Voxtral's sounds without mistral-common, which transformers leaves their text to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import transformers
from transformers.feature_extraction_utils import BatchFeature

BEGIN_TOKEN_ID = 25  # of [BEGIN_AUDIO], as [AUDIO] is 24 in every checkpoint
FRAMES_PER_TOKEN = 8


class VoxtralProcessor(transformers.VoxtralProcessor):  # type: ignore[misc]
    """transformers' processor, which writes sounds into texts too: windows of the extractor's
    length, the last filled with silence, each with as many tokens as mistral-common counts."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of a sound in a prompt."""
        return f"{self._begin}{self.audio_token}", self.audio_token

    @property
    def _begin(self) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(BEGIN_TOKEN_ID))

    def __call__(self, *, audio: Sequence[np.ndarray], text: Sequence[str], **_: Any) -> Any:
        """Processes one sound; the text holds it once."""
        frames = int(self.feature_extractor.nb_max_frames)
        features = self._retrieve_input_features(
            audio,
            frames,
            sampling_rate=self.feature_extractor.sampling_rate,
            padding=True,
            truncation=False,
            pad_to_multiple_of=self.feature_extractor.n_samples,
            return_tensors="pt",
        )
        num_tokens = features.shape[0] * -(-frames // FRAMES_PER_TOKEN)
        written = f"{self._begin}{self.audio_token * num_tokens}"
        offsets = [[{"text": text[0], "replacement": written}]]
        return BatchFeature({"input_features": features, "text_replacement_offsets": offsets})
