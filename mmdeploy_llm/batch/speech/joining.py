"""Joins what windows that overlap have heard, word by word: nothing is said twice, nothing lost.

    one window     [ ... Yes, of course. | Then we went to the st]
    the next                 [ of course. | Then we went to the station. ... ]
                                          ^ the cut

Words that both have heard at about the same time are pairs. The cut lies beside a pair near the
middle of the overlap, where a sentence ends if there is such a place: words before it are those of
the first window, words after it those of the second. What only one of them has heard between two
pairs stays. Where there are no pairs, the cut lies where the fewest words are left out. A line is
divided where the cut runs through it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from .line_words import Piece, TimedWord, pieces_of, put_together
from .pairs import Pair, Word, pairs_of, plain

LINES_VARY = 1.5  # seconds by which lines overlap that are not the same words
HEARD_NEAR = 0.1  # seconds: a word that ends so much after another one begins was heard besides it
OFF_A_LINE = 3.0  # seconds by which a cut may be farther from the middle to divide one line less
HEARD_TWICE = 1.5  # words left out, that are better than two that are said at one time
BROKEN = 0.4  # seconds at the edges of a window where words are cut off, and between two words
# First and last characters of scripts that are written without spaces.
UNSPACED = ((0x0E00, 0x0EFF), (0x0F00, 0x109F), (0x1780, 0x17FF), (0x2E80, 0xA4CF),
            (0xF900, 0xFAFF), (0x20000, 0x3FFFF))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A sentence: the seconds from the begin of the file, and what was said. language: that is
    spoken, where it was recognized or given. is_doubtful: perhaps nobody said it. speaker: who said
    it, where that is known. words: as the model tells them, if it was asked."""

    start: float
    end: float
    text: str
    language: str | None = None
    is_doubtful: bool = False
    speaker: str | None = None
    words: tuple[TimedWord, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Overlap:
    """Words of two windows, in order, and the seconds that both windows have heard."""

    ours: Sequence[Word]
    theirs: Sequence[Word]
    start: float
    end: float

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


def joined(windows: Sequence[tuple[float, float, Sequence[Line]]]) -> list[Line]:
    """Returns the lines of a file. windows: begin and end of each in seconds, with its lines."""
    found: list[Word] = []
    lines: list[Line] = []
    for index, (start, _, own) in enumerate(windows):
        new = [word for at, line in enumerate(own, len(lines)) for word in words_of(line, at)]
        lines += own
        if index:
            end = windows[index - 1][1]
            overlap = _Overlap(ours=found, theirs=new, start=start, end=end)
            new = _joined(overlap)
        found = new
    return list(_in_order(_lines(found, lines)))


def words_of(line: Line, number: int) -> Iterator[Word]:
    """Yields the words of a line, with the space before each, as if each character took as long
    where the model does not tell their times; in scripts without spaces each character is a word.
    number: that of the line, for _lines."""
    parts, was_space, is_apart = list[str](), False, True
    for one in line.text.strip():
        is_mark = unicodedata.category(one)[0] in "MP"
        is_own = any(first <= ord(one) <= last for first, last in UNSPACED) and not is_mark
        if one.isspace():
            was_space = True
            continue
        if not parts or was_space or ((is_own or is_apart) and not is_mark):
            parts.append(" " * (was_space and bool(parts)))
        parts[-1] += one
        was_space, is_apart = False, is_own or (is_apart and is_mark)
    total = sum(map(len, parts)) or 1
    span, at = line.end - line.start, 0
    pieces, used = pieces_of(line.words), 0
    is_told = len(pieces) == sum(len(part.lstrip()) for part in parts)
    for part in parts:
        begin, at = at, at + len(part)
        if is_told:
            own, used = pieces[used : used + len(part.lstrip())], used + len(part.lstrip())
            yield _told(part, own, number)
            continue
        yield Word(
            text=part,
            start=line.start + span * begin / total,
            end=line.start + span * at / total,
            line=number,
            is_spaced=_is_spaced(part),
        )


def _told(text: str, pieces: Sequence[Piece], number: int) -> Word:
    """Returns a word with the times that the model tells."""
    return Word(
        text=text,
        start=pieces[0].timed.start,
        end=pieces[-1].timed.end,
        line=number,
        is_spaced=_is_spaced(text),
        pieces=tuple(pieces),
    )


def _is_spaced(text: str) -> bool:
    return not any(first <= ord(text[-1]) <= last for first, last in UNSPACED)


def _joined(overlap: _Overlap) -> list[Word]:
    """Returns the words of two windows, each once."""
    ours, theirs = overlap.ours, overlap.theirs
    pairs = pairs_of(ours, theirs, overlap.start, overlap.end)
    if not pairs and ours and theirs and ours[-1].end - theirs[0].start < LINES_VARY:
        begin = plain(theirs[0].text)
        is_rest = bool(begin) and plain(ours[-1].text).endswith(begin)
        return [*ours, *theirs[is_rest:]]
    if not pairs:
        return _without_pairs(overlap)
    num_ours = _cut(overlap, pairs)
    found = [*ours[: pairs[0].ours], *_head(overlap, pairs[0])]
    for at, (pair, after) in enumerate(zip(pairs, [*pairs[1:], None], strict=True), 1):
        found.append(ours[pair.ours] if at <= num_ours else theirs[pair.theirs])
        if after is not None:
            found += _between(overlap, pair, after, takes_ours=at < num_ours)
    return [*found, *_tail(overlap, pairs[-1]), *theirs[pairs[-1].theirs + 1 :]]


def _between(overlap: _Overlap, one: Pair, two: Pair, *, takes_ours: bool) -> Sequence[Word]:
    """Returns the words between two pairs: where both have heard something else, of one window;
    else of the one that has. They belong to the line of the words around them if that is one."""
    ours = overlap.ours[one.ours + 1 : two.ours]
    theirs = overlap.theirs[one.theirs + 1 : two.theirs]
    if ours and theirs:
        return ours if takes_ours else theirs
    if takes_ours:
        before, after = overlap.ours[one.ours], overlap.ours[two.ours]
    else:
        before, after = overlap.theirs[one.theirs], overlap.theirs[two.theirs]
    own = ours or theirs
    if before.line != after.line:
        return own
    return [replace(word, line=before.line) for word in own]


def _head(overlap: _Overlap, first: Pair) -> Sequence[Word]:
    """Returns words that the second window alone has heard before the first pair: those that begin
    after the first window's last word ended, in the time of the first window."""
    own = overlap.theirs[: first.theirs]
    if not first.ours:
        return own
    shift = overlap.ours[first.ours].start - overlap.theirs[first.theirs].start
    before = overlap.ours[first.ours - 1].end - HEARD_NEAR
    return [word for word in own if word.start + shift >= before
            and word.end > overlap.start + BROKEN]  # fmt: skip


def _tail(overlap: _Overlap, last: Pair) -> Sequence[Word]:
    """Returns words that the first window alone has heard after the last pair."""
    own, rest = overlap.ours[last.ours + 1 :], overlap.theirs[last.theirs + 1 :]
    if not rest:
        return own
    shift = overlap.theirs[last.theirs].end - overlap.ours[last.ours].end
    after = rest[0].start + HEARD_NEAR
    return [word for word in own if word.end + shift <= after
            and word.start < overlap.end - BROKEN]  # fmt: skip


def _cut(overlap: _Overlap, pairs: Sequence[Pair]) -> int:
    """Returns how many pairs are the first window's: the cut lies near the middle of the overlap,
    where lines of both windows end, or at least of one."""

    def far(at: int) -> float:
        """Returns the distance of a cut from the middle, and more for the lines that it divides."""
        num_divided, moments = 0, list[float]()
        for words, places in (
            (overlap.ours, [pair.ours for pair in pairs]),
            (overlap.theirs, [pair.theirs for pair in pairs]),
        ):
            after = places[at] if at < len(places) else places[-1] + 1
            if 0 < after < len(words):
                num_divided += words[after - 1].line == words[after].line
            moments.append(words[after].start if after < len(words) else words[-1].end)
        return abs(sum(moments) / 2 - overlap.middle) + OFF_A_LINE * num_divided

    return min(range(len(pairs) + 1), key=far)


def _without_pairs(overlap: _Overlap) -> list[Word]:
    """Returns the first window's words up to the moment at which the fewest words are left out, and
    the second's after it. Of such moments it is the one nearest to the middle of the overlap."""
    start, end, middle = overlap.start, overlap.end, overlap.middle
    moments = [moment for word in overlap.ours for moment in (word.middle, word.end)]
    moments = [moment for moment in moments if start <= moment <= end]
    # Words that every cut keeps are not looked at again, but for the last of them.
    after_start = (at for at, own in enumerate(overlap.ours) if own.middle > start)
    num_kept = max(0, next(after_start, len(overlap.ours)) - 1)
    kept, ours = overlap.ours[:num_kept], overlap.ours[num_kept:]
    num_words = len(ours) + len(overlap.theirs)

    def cut_at(moment: float) -> tuple[list[Word], list[Word]]:
        before = [word for word in ours if word.middle <= moment]
        return before, [word for word in overlap.theirs if word.middle > moment]

    def cost(moment: float) -> tuple[float, float]:
        before, after = cut_at(moment)
        num_left_out = num_words - len(before) - len(after)
        is_twice = before and after and after[0].middle - before[-1].middle < BROKEN
        return num_left_out + HEARD_TWICE * bool(is_twice), abs(moment - middle)

    before, after = cut_at(min([middle, start, *moments], key=cost))
    return [*kept, *before, *after]


def _lines(words: Iterable[Word], lines: Sequence[Line]) -> Iterator[Line]:
    """Yields the lines of which there are words; of divided ones the words that are there."""
    for number, group in groupby(words, key=lambda word: word.line):
        own, line = list(group), lines[number]
        told = tuple(put_together(piece for word in own for piece in word.pieces))
        is_first = own[0].start <= line.start or told[:1] == line.words[:1] != ()
        yield replace(
            line,
            start=line.start if is_first else own[0].start,
            text="".join(word.text for word in own).strip(),
            words=told,
        )


def _in_order(lines: Iterable[Line]) -> Iterator[Line]:
    """Yields lines that do not overlap: where two do, the first one ends as the other begins, or
    begins no earlier than the one before."""
    found = list(lines)
    moment = 0.0
    for at, line in enumerate(found):
        start = max(line.start, moment)
        following = found[at + 1].start if at + 1 < len(found) else line.end
        end = max(start, min(line.end, max(following, start)))
        yield replace(line, start=start, end=end)
        moment = end
