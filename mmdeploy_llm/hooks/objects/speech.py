"""SpeechRules: how a model that transcribes is asked, and how its answers are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from mmdeploy_llm.values.outputs.request_output import RequestOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class SpokenWord:
    """A word with its space and marks, and the seconds from the begin of the sound at which it
    begins and ends. probability: None where the answer has no log-probabilities."""

    text: str
    start: float
    end: float
    probability: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A sentence, or what is spoken between two times: the seconds from the begin of the sound at
    which it begins and ends, and its tokens. end: None where the answer does not say it. words: see
    WordTimes."""

    start: float
    end: float | None
    ids: tuple[int, ...]
    words: tuple[SpokenWord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Heard:
    """An answer that was read. language: its code where it was recognized; None: it was given."""

    language: str | None
    spoken: tuple[Spoken, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sureness:
    """How sure a model is of an answer. no_speech: the probability that nobody speaks; 0 where
    another token is likelier than the one that says so. mean_logprob: of its words, before any
    rule."""

    no_speech: float
    mean_logprob: float


class SpeechRules(Protocol):
    """The rule of a family, built as factory(checkpoint), see `ModelSpec.speech`.

    seconds: of sound that the model hears at once. rate: samples per second. is_aligned: an
        attribute that a rule may have, True where an answer tells all of its sound, there is no
        other, and its times come with WordTimes alone: it is never asked for again.
    """

    seconds: float
    rate: int

    def prompt(self, language: str | None, task: str, before: str) -> str | Mapping[str, Any]:
        """Returns the prompt that asks for sentences with their times: a text, or the fields of a
        conversation, whose only part of a sound ({"type": "audio"}) is left open.

        language: by its code or English name; None: the model recognizes it. task: "transcribe", or
        "translate" to English. before: what was said before, or names to be spelled so. Raises
        RequestError for a language or a task that the model does not know.
        """

    def read(self, ids: Sequence[int]) -> Heard:
        """Reads the tokens of an answer to `prompt`."""

    def sureness(self, output: RequestOutput) -> Sureness:
        """Returns how sure an answer to `prompt` is, of an output with the log-probabilities of the
        likeliest token at each place of prompt and answer (logprobs=1, prompt_logprobs=1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeardText:
    """The words in the text of an answer. language: its code where the answer names it."""

    words: str
    language: str | None


@runtime_checkable
class TextRules(SpeechRules, Protocol):
    """The rule of a family that chats: its answers are texts, in which more may stand than the
    words. Their prompts' log-probabilities are not asked for.

    max_tokens: of an answer; one that is cut off there counts as poor.
    """

    max_tokens: int

    def cleaned(self, text: str) -> HeardText:
        """Returns the words in the text of an answer."""


@runtime_checkable
class WordTimes(SpeechRules, Protocol):
    """The rule of a family whose answers tell when each word is spoken."""

    def with_words(self, prompt: str) -> str:
        """Returns a prompt, a text of `prompt`, to whose answers `read_words` is applied. Raises
        RequestError for a checkpoint that does not tell it."""

    def read_words(
        self,
        output: RequestOutput,
        seconds: float,
        language: str | None,
        decode: Callable[[Sequence[int]], str],
    ) -> Heard:
        """Reads an answer to `with_words` as `read` does, with the words of each sentence, whose
        texts in a row are that of the sentence; () where the answer does not tell them.

        seconds: of sound that the model was given. language: by its code or English name, where it
        is not recognized. decode: returns the text of tokens.
        """
