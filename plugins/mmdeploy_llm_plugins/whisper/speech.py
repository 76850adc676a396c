"""How Whisper's answers say when each sentence is spoken: tokens of times, 20 ms apart."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mmdeploy_llm.errors import UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, Heard, Spoken, SpokenWord, Sureness
from mmdeploy_llm_plugins.encoder_decoder.prompts import start_id

from .prompts import WORDS, WhisperPrompts
from .words import frames_of, words_of

logger = logging.getLogger(__name__)

RATE, HOP = 16_000, 160  # samples per second and per frame, in all checkpoints unless they say more
FRAMES_OF_A_TOKEN = 2


class WhisperSpeech:
    """See hooks.SpeechRules and hooks.WordTimes. Raises UnsupportedMediaError for a checkpoint
    without timestamps."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        first = checkpoint.generation.get("no_timestamps_token_id")
        if first is None:
            raise UnsupportedMediaError(
                "its generation_config.json has no no_timestamps_token_id, so its answers have no "
                "times; take one from a newer checkpoint of the same model"
            )
        self._prompts = WhisperPrompts(checkpoint)
        fields = checkpoint.preprocessor
        self.rate = int(fields.get("sampling_rate", RATE))
        self._hop = int(fields.get("hop_length", HOP))
        self._step = FRAMES_OF_A_TOKEN * self._hop / self.rate
        self.seconds = checkpoint.config.max_source_positions * self._step
        self._first = first + 1
        self._start = start_id(checkpoint, checkpoint.config)
        ends = checkpoint.config.eos_token_id
        self._end = ends[0] if isinstance(ends, list) else ends
        languages = checkpoint.generation.get("lang_to_id") or {}
        self._width = checkpoint.config.median_filter_width
        self._has_heads = bool(checkpoint.generation.get("alignment_heads"))
        self._languages = {number: token[2:-2] for token, number in languages.items()}

    def prompt(self, language: str | None, task: str, before: str) -> str:
        """Returns the words before, and the tokens that ask. Raises RequestError for a language or
        a task that the model does not know."""
        spoken = "" if language is None else f"<|{language}|>"
        asked = f"{before}{spoken}<|{task}|><|timestamps|>"
        self._prompts.check(asked)
        return asked

    def read(self, ids: Sequence[int]) -> Heard:
        """Returns what stands between times; what follows the last one has no end."""
        language = next((self._languages[one] for one in ids[:1] if one in self._languages), None)
        return Heard(language=language, spoken=tuple(self._spoken(ids)))

    def with_words(self, prompt: str) -> str:
        """See hooks.WordTimes. Warns where the checkpoint does not name the heads."""
        if not self._has_heads:
            logger.warning(
                "generation_config.json names no alignment_heads, so words have the times of all "
                "heads of the decoder's upper half, which are less exact; transformers' "
                "checkpoints and CTranslate2's name them"
            )
        return f"{prompt}{WORDS}"

    def read_words(
        self, output: Any, seconds: float, language: str | None, decode: Callable[..., str]
    ) -> Heard:
        """See hooks.WordTimes. The probability of a word is the mean of its tokens'."""
        own = output.outputs[0]
        ids, heard = own.token_ids, self.read(own.token_ids)
        if own.attention is None:
            return heard
        first = next((at for at, one in enumerate(ids) if not self._end < one < self._first), 0)
        # From the first token on, a time; half the frames that the encoder reads are left of it.
        num_frames = math.ceil(round(seconds * self.rate) / self._hop) // FRAMES_OF_A_TOKEN
        frames = frames_of(own.attention[first + 1 :, :, :num_frames], self._width)
        starts = [*[0.0] * (first + 1), *(frames * self._step).tolist()]
        ends = [*starts[1:], starts[-1]]
        sure = [
            math.exp(entry[token].logprob)
            for token, entry in zip(ids, own.logprobs or (), strict=False)
        ]
        spoken = list[Spoken]()
        for sentence, places in zip(heard.spoken, self._places(ids), strict=True):
            words = [
                SpokenWord(
                    text=word.text,
                    start=starts[at[0]],
                    end=ends[at[-1]],
                    probability=float(np.mean([sure[one] for one in at])) if sure else None,
                )
                for word in words_of(sentence.ids, heard.language or language, self._end, decode)
                for at in [[places[one] for one in word.places]]
            ]
            if words and words[0].end > sentence.start > words[0].start:
                # The path begins with the first frame, whatever is silent there.
                words[0] = replace(words[0], start=sentence.start)
            spoken.append(replace(sentence, words=tuple(words)))
        return replace(heard, spoken=tuple(spoken))

    def _places(self, ids: Sequence[int]) -> Iterable[list[int]]:
        """Yields the places of the tokens of each sentence that `_spoken` yields."""
        places = list[int]()
        for at, token in enumerate(ids):
            if token < self._end:
                places.append(at)
            elif token >= self._first and places:
                yield places
                places = []
        if places:
            yield places

    def sureness(self, output: Any) -> Sureness:
        """See hooks.SpeechRules. Whether nobody speaks is asked at the token that starts a
        transcript, and answered by the token before that of no timestamps."""
        own, prompt = output.outputs, output.prompt_token_ids or ()
        after = max(at for at, token in enumerate(prompt) if token == self._start) + 1
        places = output.prompt_logprobs if after < len(prompt) else own.logprobs
        at_start = places[after if after < len(prompt) else 0] if places else None
        silence = (at_start or {}).get(self._first - 2)
        is_likeliest = silence is not None and silence.rank == 1
        entries = zip(own.token_ids, own.logprobs or (), strict=False)
        found = [entry[token].logprob for token, entry in entries if token <= self._end]
        return Sureness(
            no_speech=math.exp(silence.logprob) if silence and is_likeliest else 0.0,
            mean_logprob=sum(found) / len(found) if found else 0.0,
        )

    def _spoken(self, ids: Sequence[int]) -> Iterable[Spoken]:
        start, last, words = None, 0.0, list[int]()
        for token in ids:
            if token < self._first:
                words += [token] if token < self._end else []
                continue
            last = (token - self._first) * self._step
            if words:
                yield Spoken(start=start or 0.0, end=last, ids=tuple(words))
                start, words = None, []
            else:
                start = last
        if words:
            yield Spoken(start=last if start is None else start, end=None, ids=tuple(words))
