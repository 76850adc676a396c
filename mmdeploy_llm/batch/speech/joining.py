"""Joins what was heard in windows that overlap, so that nothing is said twice.

    one window     [ ... Yes, of course. | Then we went to the st]
    the next                 [ of course. | Then we went to the station. ... ]
                                          ^ the cut

What both have heard is taken from the first up to the cut, and from the second after it: the end of
a sentence of the first, as near to the middle of the overlap as there is one. A sentence that runs
through the cut has the words that both have once, and those that one of them has stay. Where one
window has heard nothing, the other one is taken.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

MOST_REPEATED = 60  # words that both windows have, at most
MOST_BROKEN = 2  # words at the end of a window that are cut off, or guessed
FEWEST = 3  # characters that are taken as said twice, in scripts without spaces
BEYOND = 0.5  # seconds by which a sentence runs through the cut; times vary by less


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A sentence: the seconds from the begin of the file, and what was said. language: that is
    spoken, where it was recognized or given."""

    start: float
    end: float
    text: str
    language: str | None = None

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
        cut = _cut(found, lines, start, windows[index - 1][1])
        kept = [line for line in found if line.middle < cut]
        new = [line for line in lines if line.middle >= cut or line.end > cut]
        found = _meeting(kept, new, cut)
    return found


def _cut(lines: Sequence[Line], new: Sequence[Line], start: float, end: float) -> float:
    """Returns where the next window takes over. new: its lines. start, end: of the overlap."""
    middle = (start + end) / 2
    ends = [line.end for line in lines if start <= line.end < end]
    cut = min(ends, key=lambda moment: abs(moment - middle), default=middle)
    last = max((line.end for line in lines), default=start)
    first = min((line.start for line in new), default=end)
    return max(min(cut, max(start, last)), first)


def _meeting(kept: list[Line], new: list[Line], cut: float) -> list[Line]:
    """Joins the lines of two windows. Where the last ones reach into the first new one, words that
    both have stand once, and no time is in both."""
    if not kept or not new or kept[-1].end <= new[0].start:
        return [*kept, *new]
    first, rest = new[0], new[1:]
    num_before = next((at for at, line in enumerate(kept) if line.end > first.start), len(kept))
    before, last = kept[:num_before], kept[num_before:]
    is_spaced = any(" " in line.text.strip() for line in (*last, first))
    theirs = _words(first.text, is_spaced)
    ours = [word for line in last for word in _words(line.text, is_spaced)]
    num_left, num_repeated = _repeated(ours, theirs, is_spaced)
    if first.middle < cut and num_repeated == len(theirs):
        return [*kept, *_after(rest, kept[-1].end)]
    if first.middle < cut and not num_repeated:
        return [*kept, *_after([*_beyond(first, theirs, cut, is_spaced), *rest], kept[-1].end)]
    shortened = [*_first_words(last, num_left, is_spaced)]
    ending = max((line.start for line in shortened), default=first.start)
    begin = max(first.start, ending)
    shortened = [replace(line, end=min(line.end, begin)) for line in shortened]
    first = replace(first, start=begin, end=max(first.end, begin))
    return [*before, *shortened, first, *rest]


def _after(lines: Sequence[Line], moment: float) -> Iterator[Line]:
    """Yields lines, none of which begins before a moment."""
    for line in lines:
        start = max(line.start, moment)
        yield replace(line, start=start, end=max(line.end, start))
        moment = start


def _first_words(lines: Sequence[Line], count: int, is_spaced: bool) -> Iterator[Line]:
    """Yields the lines with the first `count` of their words."""
    for line in lines:
        words = _words(line.text, is_spaced)
        if own := words[:count]:
            yield line if len(own) == len(words) else replace(line, text=_text(own, is_spaced))
        count -= len(own)


def _beyond(line: Line, words: Sequence[str], cut: float, is_spaced: bool) -> Iterator[Line]:
    """Yields what a line has after the cut, as if all words took as long: no word is like those
    before it."""
    if line.end - cut > BEYOND:
        count = round(len(words) * (cut - line.start) / (line.end - line.start))
        if own := words[count:]:
            yield replace(line, start=cut, text=_text(own, is_spaced))


def _repeated(ours: Sequence[str], theirs: Sequence[str], is_spaced: bool) -> tuple[int, int]:
    """Returns how many words of the first text stay, and how many of the second's first ones are at
    its end; they stay in the second, which has heard them to the end."""
    fewest = 1 if is_spaced else FEWEST
    a, b = ([_plain(word) for word in words] for words in (ours, theirs))
    for count in range(min(MOST_REPEATED, len(a), len(b)), fewest - 1, -1):
        for broken in range(MOST_BROKEN + 1 if count > fewest else 1):
            end = len(a) - broken
            if end >= count and a[end - count : end] == b[:count] and any(b[:count]):
                return end - count, count
    return len(a), 0


def _words(text: str, is_spaced: bool) -> list[str]:
    return text.split() if is_spaced else list(text)


def _text(words: Sequence[str], is_spaced: bool) -> str:
    return (" " if is_spaced else "").join(words)


def _plain(word: str) -> str:
    """Returns a word without punctuation and case."""
    return "".join(one for one in word.casefold() if unicodedata.category(one)[0] in "LNM")
