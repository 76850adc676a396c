"""Processes sounds by the checkpoint's own transformers processor. The prompt text of a sound is
what that processor writes for it."""

from __future__ import annotations

import copy
import json
import queue
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from mmdeploy_llm.errors import MediaError
from mmdeploy_llm.hooks import Checkpoint, MediaInput, MediaLimits, MediaProcessor
from mmdeploy_llm.media import OpenSound, SoundDecoder

from .loading import load_sound_processor, longest

# Keys of a processor's result that belong to the text given with the sound.
OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
    | {"text_replacement_offsets"}
)
MAX_LENGTHS = 4096  # numbers of samples whose prompt text is cached


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A processed sound: tensors for the model, and its text in the prompt."""

    tensors: Mapping[str, torch.Tensor]
    text: str


class AnyAudioProcessor(MediaProcessor):
    """A media processor for sounds of any transformers model.

    checkpoint: its processor files and tokenizer are read. options: none of the engine's
    mm_processor_kwargs concern sounds. Raises UnsupportedMediaError for a model without sounds,
    CheckpointError for files that transformers cannot use.
    """

    kind = "audio"

    def __init__(self, checkpoint: Checkpoint, options: Mapping[str, Any]) -> None:
        self._processor = self.load(checkpoint)
        self._extractor = self._processor._audio_processor
        self.rate = int(self._extractor.sampling_rate)
        self.token = _placeholder_token(checkpoint.config, self._processor)
        self._marker = str(self._processor.audio_token)
        self.markers = tuple(getattr(self._processor, "markers", (self._marker,)))
        self._decoder = SoundDecoder()
        self._texts: dict[int, str] = {}  # number of samples -> prompt text
        settings = json.dumps(self._extractor.to_dict(), sort_keys=True, default=str)
        self._settings = f"{type(self._processor).__name__}\0{settings}"
        # A fast tokenizer changes its own state when it is called, so no two threads may share one:
        # each call borrows a copy of `_processor`, which is itself never called.
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.most = self._longest()

    def load(self, checkpoint: Checkpoint) -> Any:
        """Returns transformers' processor; a family's own class may make it otherwise."""
        return load_sound_processor(checkpoint)

    def close(self) -> None:
        """Ends the decoder processes."""
        self._decoder.close()

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds after which a call counts as hanging."""
        return self._decoder.max_seconds(limits)

    def decode(self, source: Any, limits: MediaLimits) -> OpenSound:
        """Opens the bytes of a file, or an array with its rate."""
        return self._decoder.open(source, limits)

    def process(self, item: OpenSound, options: Mapping[str, Any]) -> MediaInput:
        """Returns the arguments of transformers' forward, by name, and the sound's prompt text."""
        samples = self._samples(item, options)
        made = self.make(samples)
        num_tokens = self._checked(made.text, len(samples))
        text = f"{self._settings}\0{item.digest}\0{sorted(options.items())!r}"
        return MediaInput(
            kind=self.kind,
            tensors=made.tensors,
            num_tokens=num_tokens,
            key=blake2b(text.encode(), digest_size=20).hexdigest(),
            prompt_text=made.text,
            seconds=len(samples) / self.rate,
        )

    def count_tokens(self, item: OpenSound, options: Mapping[str, Any]) -> int:
        """Returns the number of placeholder tokens of a sound of this length."""
        samples = self._samples(item, options)
        return self._checked(self._text_of(len(samples)), len(samples))

    def prompt_text(self, item: OpenSound, options: Mapping[str, Any]) -> str:
        """Returns `process(item, options).prompt_text`, from the length alone."""
        return self._text_of(len(self._samples(item, options)))

    def embedded(
        self, num_tokens: int, grid: tuple[int, int, int] | None, options: Mapping[str, Any]
    ) -> MediaInput:
        """See MediaProcessor: embeddings of any length, where the text of a sound is its tokens and
        the same text around them."""
        if grid is not None or options:
            raise MediaError("audio_embeds take no grid and no options")
        text = self._text_of(self.rate)
        start, _, end = text.partition(self.token * text.count(self.token))
        if start + self.token * text.count(self.token) + end != text:
            raise MediaError("this model writes other text between a sound's tokens")
        whole = f"{start}{self.token * num_tokens}{end}"
        return MediaInput(
            kind=self.kind, tensors={}, num_tokens=num_tokens, key="", prompt_text=whole
        )

    def make(self, samples: np.ndarray) -> Made:
        """Processes one sound. samples: float32, one channel, at `rate`."""
        with self._borrowed() as processor:
            made = processor(
                audio=[samples],
                text=[self._marker],
                sampling_rate=self.rate,
                return_tensors="pt",
                return_text_replacement_offsets=True,
                return_mm_token_type_ids=False,
            )
            written = made.get("text_replacement_offsets") or processor.written
            processor.written = ()
        if not written:
            raise MediaError(
                f"transformers' {type(self._processor).__name__} does not say how it writes a "
                "sound in a prompt; use a plugin made for this model"
            )
        (replaced,) = written[0]
        tensors = {
            name: value
            for name, value in made.items()
            if name not in OF_TEXT and isinstance(value, torch.Tensor)
        }
        return Made(tensors=tensors, text=replaced["replacement"])

    def _samples(self, item: OpenSound, options: Mapping[str, Any]) -> np.ndarray:
        because = f"this model hears at once, since {type(self._extractor).__name__} cuts the rest"
        return item.samples(self.rate, options, most=self.most, because=f"{because} off")

    def _longest(self) -> float | None:
        """Returns the seconds of sound beyond which the processor drops what follows, found by
        trying it; None: it drops nothing."""
        for seconds in longest(self._extractor):
            samples = round(seconds * self.rate)
            texts = (self.make(np.zeros(n, np.float32)).text for n in (samples, 2 * samples))
            if len(set(texts)) == 1:
                return seconds
        most = getattr(self._processor, "max_audio_len", None)
        return float(most) if most else None

    def _text_of(self, num_samples: int) -> str:
        """Returns the prompt text of a sound of this length: that of silence, cached."""
        text = self._texts.get(num_samples)
        if text is None:
            text = self.make(np.zeros(num_samples, np.float32)).text
            if len(self._texts) < MAX_LENGTHS:
                self._texts[num_samples] = text
        return text

    def _checked(self, text: str, num_samples: int) -> int:
        count = text.count(self.token)
        if not count:
            raise MediaError(
                f"the sound is too short for this model: {num_samples / self.rate:.4f} s have no "
                "token; give a longer one, or pad it with silence"
            )
        return count

    @contextmanager
    def _borrowed(self) -> Iterator[Any]:
        """Lends a processor to one thread; makes a new one when all are in use."""
        try:
            processor = self._free.get_nowait()
        except queue.Empty:
            processor = copy.copy(self._processor)
            processor.tokenizer = copy.deepcopy(self._processor.tokenizer)
        try:
            yield processor
        finally:
            self._free.put(processor)


def _placeholder_token(config: Any, processor: Any) -> str:
    """Returns the text of the placeholder token, which the embeddings of a sound replace."""
    for name in ("audio_token_id", "audio_token_index"):
        token_id = getattr(config, name, None)
        if token_id is not None:
            return str(processor.tokenizer.convert_ids_to_tokens(token_id))
    return str(processor.audio_token)
