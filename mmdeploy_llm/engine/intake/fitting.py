"""Fitting: makes the ids of a text as long as the model reads: cut, or in windows.

ids      [CLS] head a b c d e f tail [SEP]        head, tail: the instruction around the text
cut      [CLS] head a b tail [SEP]
windows  [CLS] head a b tail [SEP]   [CLS] head c d tail [SEP]   [CLS] head e f tail [SEP]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmdeploy_llm.errors import PromptTooLongError

from .tokenizer import PromptTokenizer

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Long:
    """The ids of a text that has more tokens than the model reads.

    before, after: ids that every window has: the tokenizer's own and those of the instruction.
    body: those of the text between them. num_own: how many of `before` are the tokenizer's own.
    most: tokens that the model reads.
    """

    before: Ids
    body: Ids
    after: Ids
    num_own: int
    most: int

    @property
    def room(self) -> int:
        """How many tokens of the text a window has. Raises PromptTooLongError for none."""
        room = self.most - len(self.before) - len(self.after)
        if room < 1:
            raise PromptTooLongError(
                f"the instruction leaves no room for a text: the model reads {self.most} tokens"
            )
        return room

    def cut(self, *, at_start: bool) -> Ids:
        """Returns the ids without the last ones of the text. at_start: the first ones are cut, and
        with them the instruction, as the tokenizer of the model does it."""
        if not at_start:
            return (*self.before, *self.body[: self.room], *self.after)
        own, text = self.before[: self.num_own], (*self.before[self.num_own :], *self.body)
        return (*own, *text[-(self.most - len(own) - len(self.after)) :], *self.after)

    def windows(self) -> tuple[Ids, ...]:
        """Returns the ids of windows, none of which has a token of another, but the last one may be
        shorter."""
        starts = range(0, len(self.body), self.room)
        bodies = (self.body[start : start + self.room] for start in starts)
        return tuple((*self.before, *body, *self.after) for body in bodies)


def long_text(
    tokenizer: PromptTokenizer, prefix: str, text: str, suffix: str, most: int
) -> Long | None:
    """Returns the ids of prefix + text + suffix where they are more than the model reads, else
    None. Raises RequestError."""
    whole = prefix + text + suffix
    ids = tokenizer.encode_prompt(whole)
    if len(ids) <= most:
        return None
    plain = tokenizer.encode(whole)
    num_own = _place(ids, plain)
    head = _common(tokenizer.encode(prefix), plain) if prefix else 0
    tail = _common(tokenizer.encode(suffix)[::-1], plain[::-1]) if suffix else 0
    end = len(plain) - tail
    return Long(
        before=(*ids[:num_own], *plain[:head]),
        body=tuple(plain[head:end]),
        after=(*plain[end:], *ids[num_own + len(plain) :]),
        num_own=num_own,
        most=most,
    )


def _place(ids: Sequence[int], plain: Sequence[int]) -> int:
    """Returns how many special tokens the tokenizer writes before a text."""
    count = len(plain)
    for first in range(len(ids) - count + 1):
        if list(ids[first : first + count]) == list(plain):
            return first
    raise PromptTooLongError("the tokenizer writes something into the text; it cannot be cut")


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """Returns how many ids at the start of both are the same."""
    pairs = zip(one, two, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))
