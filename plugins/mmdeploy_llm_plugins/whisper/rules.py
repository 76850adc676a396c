"""The rules of Whisper's answers: which tokens are never written, which may begin, how a language
is recognized, and in which order timestamps stand.

    output    <|de|> <|transcribe|> | <|0.00|> words <|2.40|> <|2.40|> words <|5.10|> end
              recognized language     a time before and after each sentence, none falls

They are those of Whisper's authors as transformers has them, so that greedy answers are the same.
Shapes: R requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmdeploy_llm.hooks import LogitsProcessor, LogitsRow

NEVER = -torch.inf
INDICES = ("languages", "suppressed", "suppressed_first")  # fields that are lists of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """The rules of one request.

    languages: tokens of languages. follows: tokens after a language that is recognized first; None
        where the prompt says the language. suppressed: tokens that are never written;
        suppressed_first: not as the first. end: the end of an answer. no_times: the token before
        the first timestamp. latest: the number of the last timestamp with which an answer may
        begin. has_times: whether timestamps are written.
    """

    languages: Tensor
    follows: Sequence[int] | None
    suppressed: Tensor
    suppressed_first: Tensor
    end: int
    no_times: int | None
    latest: int | None
    has_times: bool

    @property
    def num_before(self) -> int:
        """Tokens of the output that belong to the prompt."""
        return 0 if self.follows is None else 1 + len(self.follows)

    def apply(self, logits: Tensor, output: Sequence[int]) -> bool:
        """Changes logits [V] after these tokens. Returns whether timestamps compete with words."""
        if self.follows is not None and len(output) < self.num_before:
            self._begin(logits, len(output))
            return False
        words = output[self.num_before :]
        if not words:
            logits[self.suppressed_first] = NEVER
        logits[self.suppressed] = NEVER
        if self.has_times and self.no_times is not None:
            self._order(logits, words, self.no_times + 1)
            return True
        return False

    def _begin(self, logits: Tensor, index: int) -> None:
        """Leaves one token: the likeliest language, or that which follows it."""
        assert self.follows is not None, "checked by the caller"
        if index:
            only = self.follows[index - 1]
        else:
            only = int(self.languages[logits[self.languages].argmax()])
        logits.fill_(NEVER)
        logits[only] = 0

    def _order(self, logits: Tensor, words: Sequence[int], first: int) -> None:
        """Forbids timestamps where they do not stand, or that fall. first: the lowest of them."""
        logits[first - 1] = NEVER
        was_time = bool(words) and words[-1] >= first
        was_pair = was_time and (len(words) < 2 or words[-2] >= first)
        if was_pair:
            logits[first:] = NEVER
        elif was_time:
            logits[: self.end] = NEVER
        last = next((token for token in reversed(words) if token >= first), None)
        if last is not None:
            # A sentence may begin where the one before ends; it does not end where it begins.
            logits[first : last + (0 if was_time and not was_pair else 1)] = NEVER
        if not words:
            logits[:first] = NEVER
            if self.latest is not None:
                logits[first + self.latest + 1 :] = NEVER


class WhisperRules(LogitsProcessor):
    """Applies what WhisperPrompts gives with each request."""

    def check(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError: the rules come with the model's prompts, not from a caller."""
        raise ValueError(
            "its rules are applied to each answer of a Whisper model by themselves; leave it out, "
            "and write what you want into the prompt, such as '<|de|><|timestamps|>'"
        )

    def start(self, row: LogitsRow) -> AnswerRules:
        """Returns the rules with lists of tokens as tensors."""
        given: dict[str, Any] = dict(row.arguments["whisper"])
        for name in INDICES:
            given[name] = torch.tensor(given[name], dtype=torch.int64)
        rules = AnswerRules(**given)
        row.num_before = rules.num_before
        return rules

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> Tensor:
        """Changes the rows of [R, V], and lets a timestamp be written where all together are
        likelier than the likeliest word."""
        for own, row in zip(logits, rows, strict=True):
            first = row.state.no_times
            if row.state.apply(own, row.output_token_ids):
                is_time = own[first + 1 :].logsumexp(0) > own[: first + 1].amax()
                own[: first + 1].masked_fill_(is_time, NEVER)
        return logits
