"""How Parakeet's answers say when each word is spoken: by the frames at which its tokens were
found."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from math import exp
from types import MappingProxyType
from typing import Any

import numpy as np
from mmdeploy_llm_processors.from_transformers.loading import extractor_fields

from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.hooks import Checkpoint, Heard, Spoken, SpokenWord, Sureness
from mmdeploy_llm_plugins.encoder_decoder.prompts import vocabulary
from mmdeploy_llm_plugins.transformers_parts.fast_conformer import steps_of

from .granite_sound import frames_of
from .prompts import TIMES, Languages, blank_of

RATE, HOP = 16_000, 160  # samples per second and per frame, unless a checkpoint says more
SECONDS = 30.0  # of a window; the encoder reads longer ones, at a cost that grows with its square
PAUSE = 1.0  # seconds of silence after which another line begins
LAST = re.compile(r"[.?!\u3002\uff1f\uff01\u2026][\"'\u201d\u2019)\u300d]*$")  # ends a sentence
CONTEXT, PART = 8, "\ufffd"  # tokens before one; stands for a part of a character
TAG = re.compile(r"\u2581?<([a-z]{2,3}-[A-Z]{2})>")  # of the language, among the tokens
MARKS = re.compile(r"[\W_]+")  # a text without letters


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """A token of an answer: its text with its space, and the seconds at which it was found."""

    id: int
    text: str
    start: float
    end: float
    probability: float | None


class ParakeetSpeech:
    """See hooks.SpeechRules and hooks.WordTimes. tags: tokens that name a language and are no
    words, with its code."""

    seconds = SECONDS
    is_aligned = True
    tags: Mapping[int, str] = MappingProxyType({})

    def __init__(self, checkpoint: Checkpoint) -> None:
        fields, encoder = extractor_fields(checkpoint) or {}, checkpoint.config.encoder_config
        self.rate = int(fields.get("sampling_rate", RATE))
        self._step = self.frames(encoder) * int(fields.get("hop_length", HOP)) / self.rate
        self._end = blank_of(checkpoint)

    def frames(self, encoder: Any) -> int:
        """Returns how many mel frames the encoder makes one of. encoder: its config."""
        return int(encoder.subsampling_conv_stride ** steps_of(encoder))

    def prompt(self, language: str | None, task: str, before: str) -> str:
        """Returns an empty question. Raises RequestError for what the model cannot be asked."""
        if language is not None:
            raise RequestError(
                f"this model writes what it hears and is not asked for {language!r:.40}; "
                "leave the language out, or take a checkpoint that knows it"
            )
        if task != "transcribe":
            raise RequestError("this model cannot translate; leave the task out")
        if before:
            raise RequestError("this model reads no words before a sound; leave them out")
        return " "

    def with_words(self, prompt: str) -> str:
        """See hooks.WordTimes."""
        return f"{prompt}{TIMES}"

    def read(self, ids: Sequence[int]) -> Heard:
        """Returns all words as one sentence: their times are not in the tokens."""
        own = tuple(one for one in ids if self._is_word(one))
        spoken = (Spoken(start=0.0, end=None, ids=own),) if own else ()
        return Heard(language=self._language(ids), spoken=spoken)

    def _is_word(self, token: int) -> bool:
        return token != self._end and token not in self.tags

    def _language(self, ids: Sequence[int]) -> str | None:
        """Returns the language that an answer names last; None for none."""
        return next((self.tags[one] for one in reversed(ids) if one in self.tags), None)

    def read_words(
        self, output: Any, seconds: float, language: str | None, decode: Callable[..., str]
    ) -> Heard:
        """See hooks.WordTimes. A word is what stands between spaces; marks take no time of it. A
        line ends with a sentence and before a pause."""
        own = output.outputs[0]
        if own.attention is None:
            return self.read(own.token_ids)
        words = list[list[_Token]]()
        for token in self._tokens(own, seconds, decode):
            if not words or token.text[:1].isspace():
                words.append([])
            words[-1].append(token)
        spoken = tuple(map(_spoken, _lines(words)))
        return Heard(language=self._language(own.token_ids), spoken=spoken)

    def _tokens(self, own: Any, seconds: float, decode: Callable[..., str]) -> Iterator[_Token]:
        """Yields the tokens of an answer with their times, none after the end of the sound."""
        places = [at for at, one in enumerate(own.token_ids) if self._is_word(one)]
        ids = [own.token_ids[at] for at in places]
        times = np.minimum(own.attention.argmax(-1) * self._step, seconds).tolist()
        for at, token, text in zip(places, ids, texts_of(ids, decode), strict=True):
            start, end = times[at]
            sure = exp(own.logprobs[at][token].logprob) if own.logprobs else None
            yield _Token(id=token, text=text, start=start, end=end, probability=sure)

    def sureness(self, output: Any) -> Sureness:
        """See hooks.SpeechRules. No token says that nobody speaks."""
        own = output.outputs
        entries = zip(own.token_ids, own.logprobs or (), strict=False)
        found = [entry[token].logprob for token, entry in entries if self._is_word(token)]
        return Sureness(no_speech=0.0, mean_logprob=sum(found) / len(found) if found else 0.0)


class GraniteSpeech5Speech(ParakeetSpeech):
    """That of Granite Speech 5, whose encoder makes other frames."""

    def frames(self, encoder: Any) -> int:
        """See ParakeetSpeech."""
        return frames_of(encoder)


class LanguageSpeech(ParakeetSpeech):
    """That of Nemotron 3.5 ASR, which is told a language or names it after the words."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self._languages = Languages(checkpoint)
        found = {at: TAG.fullmatch(name) for name, at in vocabulary(checkpoint).items()}
        self.tags = {at: own[1] for at, own in found.items() if own is not None}

    def prompt(self, language: str | None, task: str, before: str) -> str:
        """Returns the language. Raises RequestError for what the model cannot be asked."""
        asked = super().prompt(None, task, before)
        if language is None:
            return asked
        self._languages.id_of(language)
        return f"<|{language}|>"


def texts_of(ids: Sequence[int], decode: Callable[..., str]) -> Sequence[str]:
    """Returns the text that each token adds to those before it, together that of all; one that is a
    part of a character adds none, and the last of these all of it."""
    whole, found = decode(ids), list[str]()
    for at in range(len(ids)):
        context = ids[max(0, at - CONTEXT) : at]
        before = decode(context).rstrip(PART) if context else ""
        text = decode([*context, ids[at]])
        found.append((text if at + 1 == len(ids) else text.rstrip(PART))[len(before) :])
    if "".join(found) == whole:
        return found
    # Bytes that are no characters, of which a later one may change what was written.
    grown = (num_alike(decode(ids[:end]), whole) for end in range(1, len(ids)))
    ends = [0, *accumulate(grown, max), len(whole)]
    return [whole[start:end] for start, end in pairwise(ends)]


def num_alike(one: str, other: str) -> int:
    """Returns how many first characters two texts share."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _word(tokens: Sequence[_Token]) -> SpokenWord:
    heard = [one for one in tokens if not MARKS.fullmatch(one.text)] or tokens[:1]
    sure = [one.probability for one in tokens if one.probability is not None]
    return SpokenWord(
        text="".join(one.text for one in tokens),
        start=heard[0].start,
        end=max(heard[0].start, heard[-1].end),
        probability=sum(sure) / len(sure) if sure else None,
    )


def _lines(words: Iterable[list[_Token]]) -> Iterator[list[list[_Token]]]:
    """Yields the words of each line."""
    line = list[list[_Token]]()
    for tokens in words:
        if line:
            last = _word(line[-1])
            if LAST.search(last.text) or _word(tokens).start - last.end >= PAUSE:
                yield line
                line = []
        line.append(tokens)
    if line:
        yield line


def _spoken(line: Sequence[Sequence[_Token]]) -> Spoken:
    words = tuple(map(_word, line))
    ids = tuple(one.id for tokens in line for one in tokens)
    return Spoken(start=words[0].start, end=words[-1].end, ids=ids, words=words)
