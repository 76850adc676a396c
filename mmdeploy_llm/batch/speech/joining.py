"""Joins what was heard in windows that overlap, so that nothing is said twice.

    one window     [ ... Yes, of course. | Then we went to the st]
    the next                 [ of course. | Then we went to the station. ... ]
                                          ^ the cut

What both have heard is taken from the first up to the cut, and from the second after it: the end of
a sentence of the first, as near to the middle of the overlap as there is one. A sentence that runs
through the cut has the words that both have once.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

MOST_REPEATED = 60  # words that both windows have, at most
MOST_BROKEN = 2  # words at the end of a window that are cut off, or guessed
FEWEST = 3  # characters that are taken as said twice, in scripts without spaces


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A sentence: the seconds from the begin of the file, and what was said."""

    start: float
    end: float
    text: str

    @property
    def middle(self) -> float:
        """The moment between begin and end."""
        return (self.start + self.end) / 2


def joined(windows: Sequence[tuple[float, float, Sequence[Line]]]) -> list[Line]:
    """Returns the lines of a file. windows: begin and end of each in seconds, with its lines."""
    found: list[Line] = []
    for index, (start, _, lines) in enumerate(windows):
        if not index:
            found = list(lines)
            continue
        before_end = windows[index - 1][1]
        cut = _cut(found, start, before_end)
        kept = [line for line in found if line.middle < cut]
        new = [line for line in lines if line.middle >= cut]
        found = _meeting(kept, new)
    return found


def _cut(lines: Sequence[Line], start: float, end: float) -> float:
    """Returns where the next window takes over. start, end: of the overlap."""
    middle = (start + end) / 2
    ends = [line.end for line in lines if start <= line.end < end]
    return min(ends, key=lambda moment: abs(moment - middle), default=middle)


def _meeting(kept: list[Line], new: list[Line]) -> list[Line]:
    """Joins the lines of two windows. Where the last line reaches into the first new one, words
    that both have stand once, and no time is in both."""
    if not kept or not new or kept[-1].end <= new[0].start:
        return [*kept, *new]
    last, first = kept[-1], new[0]
    left, right = _without_repeated(last.text, first.text)
    last = replace(last, end=max(last.start, first.start), text=left)
    first = replace(first, start=last.end, end=max(first.end, last.end), text=right)
    return [*kept[:-1], *(line for line in (last, first) if line.text), *new[1:]]


def _without_repeated(left: str, right: str) -> tuple[str, str]:
    """Returns two texts without the words with which the first ends and the second begins; they
    stay in the second, which has heard them to the end."""
    is_spaced = " " in left.strip() or " " in right.strip()
    ours, theirs = (text.split() if is_spaced else list(text) for text in (left, right))
    glue, fewest = (" ", 1) if is_spaced else ("", FEWEST)
    a, b = ([_plain(word) for word in words] for words in (ours, theirs))
    for count in range(min(MOST_REPEATED, len(a), len(b)), fewest - 1, -1):
        for broken in range(MOST_BROKEN + 1 if count > fewest else 1):
            end = len(a) - broken
            if end >= count and a[end - count : end] == b[:count] and any(b[:count]):
                return glue.join(ours[: end - count]), right
    return left, right


def _plain(word: str) -> str:
    """Returns a word without punctuation and case."""
    return "".join(one for one in word.casefold() if unicodedata.category(one)[0] in "LNM")
