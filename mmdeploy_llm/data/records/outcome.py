"""The outcome of an item: whether it has its answer, and if not, what it has instead.

    failed      an error: there is no answer, or none that may be used
    empty       the answer has no text and no tool call
    repetition  the text ran in a loop, and was ended, cut off in it, or went on after it
    malformed   the text holds a tag of the model's own format, or ends within a sentence
    truncated   the text was cut off at max_tokens or at the length of the context
    ok          none of these

With several samples the item's outcome is the worst of theirs, in the order of this list. An empty
text that keeps its constraint (`guided_decoding`) is an answer; so is a text of the length that
`ignore_eos` asks for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from mmdeploy_llm.errors import ConfigError

if TYPE_CHECKING:
    from mmdeploy_llm.values.outputs.request_output import CompletionOutput
    from mmdeploy_llm.values.params import SamplingParams

TAIL = 1024  # tokens at the end that are looked at
MAX_PERIOD = 200
FEWEST_TOKENS, FEWEST_TIMES = 64, 4  # of a loop: shorter ones are found in sound texts
MAX_WORDS, FEWEST_PHRASES = 8, 8  # of a phrase that repeats in a text
# Cells of tables and numbers repeat in sound texts, so they are words of their own that end a loop.
WORD = re.compile(r"[^\W\d_]+|[\d|]")
LETTERS = re.compile(r"([^\W\d_]{1,8}?)\1{15}")
# Tags that models write for programs, and special tokens.
TAG = re.compile(r"<(/?)(think|thinking|thought|answer|tool_call|tool_response)>|<\|[\w ]{1,40}\|>")
# The end of a word that is no abbreviation, and the beginning of the next sentence.
SENTENCE_END = re.compile(r"[^\W\d_]{5}[.!?][\"')\]]* +[^\W\d_a-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The last `period` tokens of a text, which stand there `times` times in a row or more."""

    period: int
    times: int

    def __str__(self) -> str:
        tokens = "token repeats" if self.period == 1 else f"{self.period} tokens repeat"
        return f"the last {tokens} {self.times} times"


def loop_of(token_ids: Sequence[int]) -> Loop | None:
    """Returns the loop with the shortest period at the end of a text, None without one."""
    import numpy as np  # which reports and commands without a model do not need

    tail = np.asarray(token_ids[-TAIL:], dtype=np.int64)
    for period in range(1, min(MAX_PERIOD, len(tail) // FEWEST_TIMES) + 1):
        differs = np.flatnonzero(tail[period:] != tail[:-period])
        begin = 0 if not len(differs) else int(differs[-1]) + 1
        length = len(tail) - begin
        if length >= max(FEWEST_TOKENS, FEWEST_TIMES * period):
            return Loop(period=period, times=length // period)
    return None


def phrase_loop(text: str) -> str | None:
    """Says which words stand in a text FEWEST_PHRASES times in a row or more; None without any."""
    if (same := LETTERS.search(text)) is not None:
        return f"{same[1]!r} repeats without a break"
    words = WORD.findall(text.lower())
    if max(Counter(words).values(), default=0) < FEWEST_PHRASES:  # as in most texts
        return None
    for period in range(1, MAX_WORDS + 1):
        run = 0
        for place in range(period, len(words)):
            is_same = words[place] == words[place - period] and words[place].isalpha()
            run = run + 1 if is_same else 0
            if run == period * (FEWEST_PHRASES - 1):
                phrase = " ".join(words[place - period + 1 : place + 1])
                return f"{phrase!r} repeats {FEWEST_PHRASES} times or more"
    return None


def fault_of(text: str) -> str | None:
    """Says why a text that the model ended is no whole answer: a tag that nothing opens or closes,
    a special token, or an end within a sentence where there are several; None for others."""
    opened: list[str] = []
    for tag in TAG.finditer(text):
        if tag[2] is None:
            return f"the text holds {tag[0]}"
        if not tag[1]:
            opened.append(tag[2])
        elif not opened or opened.pop() != tag[2]:
            return f"the text holds {tag[0]} without its beginning"
    if opened:
        return f"the text holds <{opened[-1]}> without its end"
    is_prose = "\n" not in text and SENTENCE_END.search(text)
    if is_prose and (text[-1].isalnum() or text[-1] in ",:;(-"):
        return "the text ends within a sentence"
    return None


Outcome = Literal["failed", "empty", "repetition", "malformed", "truncated", "ok"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)  # the worst one first
LACKING = OUTCOMES[1:-1]  # not failed, and not what was asked for
MAX_TOKENS, MAX_LENGTH, MAX_MODEL_LEN = "max_tokens", "max_length", "max_model_len"
MAX_SHOWN = 40  # characters of a wrong value


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of a sample. reason: why, where the outcome alone does not say it."""

    outcome: Outcome
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Holds what an outcome depends on. is_asked: whether its constraint allows an empty text, or
    its parameters wanted a text of this length. limit: what ended a text that was cut off,
    MAX_TOKENS, MAX_LENGTH or MAX_MODEL_LEN. loop: in words, the one in which a
    text was cut off."""

    text: str
    has_calls: bool
    finish_reason: str | None
    is_failed: bool
    has_reasoning: bool
    is_asked: bool = False
    limit: str | None = None
    loop: str | None = None

    @classmethod
    def of(cls, own: CompletionOutput, params: SamplingParams) -> Sample:
        """Returns the sample of a completion."""
        is_cut = own.finish_reason == "length"
        most = params.max_tokens
        is_full = most is not None and len(own.token_ids) >= most
        rest = MAX_MODEL_LEN if params.max_length is None else MAX_LENGTH
        return cls(
            text=own.text.strip(),
            has_calls=bool(own.tool_calls),
            finish_reason=own.finish_reason,
            is_failed=not own.is_ok,
            has_reasoning=bool((own.reasoning_content or "").strip()),
            is_asked=bool(own.is_valid) or (params.ignore_eos and is_cut),
            limit=(MAX_TOKENS if is_full else rest) if is_cut else None,
            loop=str(loop) if is_cut and (loop := loop_of(own.token_ids)) else None,
        )

    @property
    def verdict(self) -> Verdict:
        """The outcome, with its reason."""
        if self.is_failed:
            return Verdict(outcome="failed")
        if self.finish_reason == "repetition":
            return Verdict(outcome="repetition")
        if self.is_asked:
            return Verdict(outcome="ok")
        if self.loop is not None:
            return Verdict(outcome="repetition", reason=self.loop)
        if not self.text and not self.has_calls:
            return Verdict(outcome="empty", reason=self._why_empty())
        if (phrase := phrase_loop(self.text)) is not None:
            return Verdict(outcome="repetition", reason=phrase)
        if self.finish_reason == "stop" and (fault := fault_of(self.text)) is not None:
            return Verdict(outcome="malformed", reason=fault)
        if self.finish_reason == "length":
            reason = None if self.limit is None else f"{self.limit} was reached"
            return Verdict(outcome="truncated", reason=reason)
        return Verdict(outcome="ok")

    def _why_empty(self) -> str | None:
        if self.finish_reason != "length":
            return "the model ended after its thinking" if self.has_reasoning else None
        limit = self.limit or "the length limit"
        used = "the thinking" if self.has_reasoning else "white space or special tokens"
        return f"{used} took all of {limit}"


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Returns the worst of several verdicts, of which there is at least one."""
    return min(verdicts, key=lambda verdict: OUTCOMES.index(verdict.outcome))


def counted(outcomes: Mapping[str, int]) -> list[str]:
    """Returns counts of outcomes that are neither failed nor ok in words: ["2 empty"]."""
    return [f"{outcomes[name]} {name}" for name in LACKING if outcomes.get(name)]


def verdict_of(samples: Iterable[CompletionOutput], params: SamplingParams) -> Verdict:
    """Returns the verdict of all samples of an item."""
    return worst(Sample.of(own, params).verdict for own in samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retried:
    """Which items with a record a resumed run does again: those with one of these outcomes, and the
    failed ones with one of these error codes."""

    outcomes: frozenset[str] = frozenset(("failed",))
    codes: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, given: bool | Collection[int | str] | str) -> Retried:
        """Reads True or "all" (all that failed), False (nothing), or names of outcomes and error
        codes, in a collection or in a text such as "empty,408". Raises ConfigError."""
        if isinstance(given, bool):
            return ALL_FAILED if given else NOTHING
        words = given.split(",") if isinstance(given, str) else given
        names = [word.strip() if isinstance(word, str) else word for word in words]
        outcomes = ["failed" if name == "all" else name for name in names]
        known = [name for name in outcomes if name in OUTCOMES[:-1]]
        try:
            codes = frozenset(int(name) for name in outcomes if name not in known)
        except (TypeError, ValueError):
            codes = frozenset({0})
        if not outcomes or not all(400 <= code < 600 for code in codes):
            raise ConfigError(
                "which items are retried must be 'all' (those that failed), or names of outcomes "
                f"({', '.join(OUTCOMES[:-1])}) and error codes from 400 to 599, such as "
                f"empty,truncated,408; got {str(given)[:MAX_SHOWN]!r}"
            )
        return cls(outcomes=frozenset(map(str, known)), codes=codes)

    def takes(self, outcome: str, error_code: int | None) -> bool:
        """Returns whether an item with such a record is done again."""
        return outcome in self.outcomes or error_code in self.codes


ALL_FAILED, NOTHING = Retried(), Retried(outcomes=frozenset())
