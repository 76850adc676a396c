"""How Moonshine's answers are read: they are words without times, so a window is one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import Checkpoint, Heard, Spoken, Sureness

RATE = 16_000  # samples per second, unless a checkpoint says more
SECONDS = 30.0  # of the longest sounds that the published ones were trained on


class MoonshineSpeech:
    """See hooks.SpeechRules."""

    seconds = SECONDS

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.rate = int(checkpoint.preprocessor.get("sampling_rate", RATE))

    def prompt(self, language: str | None, task: str, before: str) -> str:
        """Returns an empty question. Raises RequestError for what the model cannot be asked."""
        if language is not None:
            raise RequestError(
                f"a moonshine checkpoint knows one language and is not asked for {language!r:.40}; "
                "leave the language out, or take the checkpoint of that language"
            )
        if task != "transcribe":
            raise RequestError("a moonshine model cannot translate; leave the task out")
        if before:
            raise RequestError("a moonshine model reads no words before a sound; leave them out")
        return " "

    def read(self, ids: Sequence[int]) -> Heard:
        """Returns all words as one sentence, whose end the answer does not say."""
        spoken = (Spoken(start=0.0, end=None, ids=tuple(ids)),) if ids else ()
        return Heard(language=None, spoken=spoken)

    def sureness(self, output: Any) -> Sureness:
        """See hooks.SpeechRules. No token says that nobody speaks."""
        own = output.outputs
        entries = zip(own.token_ids, own.logprobs or (), strict=False)
        found = [entry[token].logprob for token, entry in entries]
        return Sureness(no_speech=0.0, mean_logprob=sum(found) / len(found) if found else 0.0)
