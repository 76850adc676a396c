"""Processes sounds by the checkpoint's own transformers processor. The prompt text of a sound is
what that processor writes for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from mmdeploy_llm_processors.from_transformers.lending import Lender
from mmdeploy_llm_processors.from_transformers.loading import (
    cut_by,
    described,
    longest,
    prepared_by,
)
from mmdeploy_llm_processors.sized import Prepared, SoundProcessor

from mmdeploy_llm.hooks import Checkpoint
from mmdeploy_llm_plugins.transformers_media.processing import made_of_one

from .loading import load_sound_processor


class AnyAudioProcessor(SoundProcessor):
    """A media processor for sounds of any transformers model.

    checkpoint: its processor files and tokenizer are read. options: none of the engine's
    mm_processor_kwargs concern sounds. Raises UnsupportedMediaError for a model without sounds,
    CheckpointError for files that transformers cannot use.
    """

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        super().__init__(checkpoint, options)
        self._processor = load_sound_processor(checkpoint)
        extractor = self._processor._audio_processor
        self.rate, self.because = int(extractor.sampling_rate), cut_by(extractor)
        self.token = _placeholder_token(checkpoint.config, self._processor)
        self._marker = str(self._processor.audio_token)
        self.markers = tuple(getattr(self._processor, "markers", (self._marker,)))
        self._identity = f"{type(self._processor).__name__}\0{described(extractor)}"
        self._lender: Lender[Any] = Lender(self._copied)
        most = getattr(self._processor, "max_audio_len", None)
        self.most = self.longest(longest(extractor)) or (float(most) if most else None)

    @property
    def identity(self) -> str:
        """Returns the classes of transformers, and the fields of the feature extractor."""
        return self._identity

    def prepare(self, content: np.ndarray, settings: Mapping[str, Any]) -> Prepared:
        """Returns the arguments of transformers' forward, by name, and the sound's prompt text.
        content: float32 samples of one channel, at `rate`."""
        with self._lender.lent() as processor:
            with prepared_by(processor, len(content), self.rate):
                made = processor(
                    audio=[content],
                    text=[self._marker],
                    sampling_rate=self.rate,
                    return_tensors="pt",
                    return_text_replacement_offsets=True,
                    return_mm_token_type_ids=False,
                )
            text, tensors = made_of_one(processor, made, "a sound")
        return Prepared(tensors=tensors, text=text, seconds=len(content) / self.rate)

    def _copied(self) -> Any:
        """Returns a copy for one thread: a fast tokenizer changes its own state when called."""
        processor = copy.copy(self._processor)
        processor.tokenizer = copy.deepcopy(self._processor.tokenizer)
        return processor


def _placeholder_token(config: Any, processor: Any) -> str:
    """Returns the text of the placeholder token, which the embeddings of a sound replace."""
    for name in ("audio_token_id", "audio_token_index"):
        token_id = getattr(config, name, None)
        if token_id is not None:
            return str(processor.tokenizer.convert_ids_to_tokens(token_id))
    return str(processor.audio_token)
