"""Finds the words that two windows have both heard, in order and at about the same time.

first     then  we went  to  the  st
                   |     |   |
second            went  to  the  station  they  say
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .line_words import Piece

MOST_APART = 4.0  # seconds between the two times of a word, which are those of whole sentences
ALONE_APART = 1.0  # of a word beside which no other is a pair
FEWEST_CHARACTERS = 3  # beside each other that are pairs, in scripts without spaces
BESIDE = 0.5  # how much more a pair counts that follows another one
AROUND = 4.0  # seconds beyond the overlap in which words are looked for, as times vary


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word, with the space before it, and the seconds at which it is said. line: the number of
    its line. is_spaced: whether its script has spaces. pieces: of the words of its line that it is
    made of, where the model tells them; () where it does not."""

    text: str
    start: float
    end: float
    line: int
    is_spaced: bool
    pieces: tuple[Piece, ...] = ()

    @property
    def middle(self) -> float:
        """The moment between begin and end."""
        return (self.start + self.end) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The indices of a word in the first and in the second window."""

    ours: int
    theirs: int


def pairs_of(
    ours: Sequence[Word], theirs: Sequence[Word], start: float, end: float
) -> Sequence[Pair]:
    """Returns the words of two windows that are the same, in order. start, end: seconds that both
    windows have heard."""
    first = next((at for at, word in enumerate(ours) if word.end > start - AROUND), len(ours))
    num_theirs = next((at for at, word in enumerate(theirs) if word.start > end + AROUND),
                      len(theirs))  # fmt: skip
    near = _best(ours[first:], theirs[:num_theirs])
    pairs = [Pair(ours=first + one, theirs=two) for one, two in near]
    return [pair for run in _runs(pairs) for pair in run if _is_sure(run, ours, theirs)]


def _best(ours: Sequence[Word], theirs: Sequence[Word]) -> list[tuple[int, int]]:
    """Returns the indices of pairs that have the highest sum: one for a pair, less the farther
    apart its times are, and more for one that follows another."""
    one, two = ([plain(word.text) for word in words] for words in (ours, theirs))
    # best[i][j]: of the first i and j words; is_pair[i][j]: whether the last of them are one.
    best = [[0.0] * (len(two) + 1) for _ in range(len(one) + 1)]
    is_pair = [[False] * (len(two) + 1) for _ in range(len(one) + 1)]
    for i, word in enumerate(one, 1):
        for j, other in enumerate(two, 1):
            best[i][j] = max(best[i - 1][j], best[i][j - 1])
            apart = abs(ours[i - 1].middle - theirs[j - 1].middle)
            if word and word == other and apart < MOST_APART:
                gain = 1 - apart / MOST_APART
                gain *= 1 + BESIDE * is_pair[i - 1][j - 1]
                if best[i - 1][j - 1] + gain > best[i][j]:
                    best[i][j], is_pair[i][j] = best[i - 1][j - 1] + gain, True
    found, i, j = list[tuple[int, int]](), len(one), len(two)
    while i and j:
        if is_pair[i][j]:
            i, j = i - 1, j - 1
            found.append((i, j))
        elif best[i - 1][j] >= best[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def _runs(pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
    """Yields pairs that stand beside each other in both windows."""
    run: list[Pair] = []
    for pair in pairs:
        if run and (pair.ours, pair.theirs) != (run[-1].ours + 1, run[-1].theirs + 1):
            yield run
            run = []
        run.append(pair)
    if run:
        yield run


def _is_sure(run: Sequence[Pair], ours: Sequence[Word], theirs: Sequence[Word]) -> bool:
    """Whether a run is no chance: a short one has the same times in both windows, or is the end of
    one and the begin of the other."""
    is_at_edge = run[-1].ours == len(ours) - 1 and run[0].theirs == 0
    if is_at_edge:
        return True
    if not all(ours[pair.ours].is_spaced for pair in run):
        return len(run) >= FEWEST_CHARACTERS
    apart = min(abs(ours[pair.ours].middle - theirs[pair.theirs].middle) for pair in run)
    return apart <= ALONE_APART * len(run)


def plain(word: str) -> str:
    """Returns a word without punctuation and case."""
    return "".join(one for one in word.casefold() if unicodedata.category(one)[0] in "LNM")
