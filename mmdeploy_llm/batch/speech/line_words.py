"""The words of a line as the model tells them, with their times: where windows are joined they are
cut and put together again, as the join has words of its own, at spaces or of single characters.

    told by the model    "Yes" ", of" " course"       with times of each
    words of the join    "Yes, "  "of" " course"      made of pieces of these
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mmdeploy_llm.hooks import SpokenWord


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedWord:
    """A word with the space before it and the marks beside it: the seconds from the begin of the
    file at which it begins and ends. probability: None where it is not known."""

    text: str
    start: float
    end: float
    probability: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Characters first .. end of a word, as if each took as long."""

    word: TimedWord
    first: int
    end: int

    @property
    def timed(self) -> TimedWord:
        """The piece as a word."""
        word = self.word
        each = (word.end - word.start) / len(word.text)
        start, end = (word.start + each * at for at in (self.first, self.end))
        return replace(word, text=word.text[self.first : self.end], start=start, end=end)


def timed_words(words: Iterable[SpokenWord], first: float, latest: float) -> Iterator[TimedWord]:
    """Yields the words of a sentence. first: where its sound begins in the file. latest: where the
    window ends, after which no word is."""
    for word in words:
        start = min(first + word.start, latest)
        end = max(start, min(first + word.end, latest))
        yield TimedWord(text=word.text, start=start, end=end, probability=word.probability)


def pieces_of(words: Sequence[TimedWord]) -> list[Piece]:
    """Returns a piece for each character of the words that is no space."""
    return [
        Piece(word=word, first=at, end=at + 1)
        for word in words
        for at, one in enumerate(word.text)
        if not one.isspace()
    ]


def put_together(pieces: Iterable[Piece]) -> Iterator[TimedWord]:
    """Yields the words that pieces in order are of, whole or what is there of them; none begins
    before the one before it."""
    moment = 0.0
    for _, group in groupby(pieces, key=lambda piece: id(piece.word)):
        own = list(group)
        word = own[0].word
        start = len(word.text) - len(word.text.lstrip())
        is_first, is_last = own[0].first == start, own[-1].end == len(word.text.rstrip())
        piece = Piece(
            word=word,
            first=0 if is_first else own[0].first,
            end=len(word.text) if is_last else own[-1].end,
        )
        found = piece.timed
        found = word if is_first and is_last else found
        moment = max(moment, found.start)
        yield replace(found, start=moment, end=max(moment, found.end))
