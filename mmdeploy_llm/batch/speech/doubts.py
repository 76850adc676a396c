"""Says which answers about a window are poor, doubtful, or said by nobody."""

from __future__ import annotations

import zlib

from mmdeploy_llm.hooks import Sureness

MOST_COMPRESSED = 2.4  # bytes of a text that become one
LEAST_LOGPROB = -1.0  # mean log-probability of words that are taken
SURE_LOGPROB = -0.4  # of words beside which it does not count that silence is likely
NO_SPEECH_AT_ALL = 0.8  # probability beyond which no answer is taken without a mark
NO_SPEECH = 0.6  # probability beyond which an answer that is not sure either was said by nobody


def is_poor(text: str, finish_reason: str | None, mean_logprob: float = 0.0) -> bool:
    """Whether an answer was cut off, repeats itself, or is a guess."""
    data = text.encode()
    is_repeated = len(data) > MOST_COMPRESSED * len(zlib.compress(data))
    return finish_reason == "length" or is_repeated or mean_logprob < LEAST_LOGPROB


def is_doubtful(sure: Sureness) -> bool:
    """Whether nobody may have said an answer that is not poor. Where a window begins within a word,
    models hold it for no speech too, but are sure of what follows."""
    is_guess = sure.no_speech > 0 and sure.mean_logprob < SURE_LOGPROB
    return is_guess or sure.no_speech > NO_SPEECH_AT_ALL


def is_unspoken(text: str, sure: Sureness) -> bool:
    """Whether nobody said an answer: the model says so and is not sure of the words, or there are
    none."""
    is_guess = sure.no_speech > NO_SPEECH and sure.mean_logprob < LEAST_LOGPROB
    return is_guess or not any(one.isalnum() for one in text)
