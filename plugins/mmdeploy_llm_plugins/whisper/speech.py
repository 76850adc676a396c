"""How Whisper's answers say when each sentence is spoken: tokens of times, 20 ms apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from mmdeploy_llm.errors import UnsupportedMediaError
from mmdeploy_llm.hooks import Checkpoint, Heard, Spoken, Sureness
from mmdeploy_llm_plugins.encoder_decoder.prompts import start_id

from .prompts import WhisperPrompts

RATE, HOP = 16_000, 160  # samples per second and per frame, in all checkpoints unless they say more
FRAMES_OF_A_TOKEN = 2


class WhisperSpeech:
    """See hooks.SpeechRules. Raises UnsupportedMediaError for a checkpoint without timestamps."""

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
        self._step = FRAMES_OF_A_TOKEN * int(fields.get("hop_length", HOP)) / self.rate
        self.seconds = checkpoint.config.max_source_positions * self._step
        self._first = first + 1
        self._start = start_id(checkpoint, checkpoint.config)
        ends = checkpoint.config.eos_token_id
        self._end = ends[0] if isinstance(ends, list) else ends
        languages = checkpoint.generation.get("lang_to_id") or {}
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
