"""Untimed: how answers are read that are words without times, so that a window is one line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmdeploy_llm.hooks import Heard, Spoken, Sureness

RATE = 16_000  # samples per second, unless a checkpoint says more


class Untimed:
    """Implements what hooks.SpeechRules says of answers; a family adds its prompt, rate and
    seconds."""

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
