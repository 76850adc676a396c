"""Plans the windows of a sound that a model hears: of all of it, or of its speech alone.

    recording        [ speech ].......[ speech ].......[ speech, longer than a window ]
    windows of all   [--------------]
                                [--------------] ...       each overlaps the one before
    of its speech    [ speech ][ speech ]              [--------------]
                      one window, two pieces                      [-------------------]

A window of speech has pieces of the recording beside each other, without the silence between them;
it is cut in silence. Where speech goes on for longer than a window, its windows overlap, as those
of a whole recording do: one in which nothing is left out has the same transcript.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Self

import numpy as np

from mmdeploy_llm.errors import ConfigError

# Seconds around speech that are heard too: beginnings and ends of words are faint, and after half a
# minute of silence Silero finds the same beginning up to 0.26 s later than after one second.
PADDING = 0.3
KEPT = 1.0  # seconds of silence at most, beside those, that are heard too
ACROSS = 0.4  # seconds on both sides of a place where silence was left out, of a line across it

Stretch = tuple[int, int]  # first sample and end


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Samples first .. end of a channel of a sound. channel: from 0; of a mixed sound 0. pieces:
    what of it is heard, in order; (): all. overlaps: whether it begins in the window before."""

    first: int
    end: int
    channel: int = 0
    pieces: tuple[Stretch, ...] = ()
    overlaps: bool = False

    def sound(self, samples: np.ndarray) -> np.ndarray:
        """Returns what is heard of the samples of its channel."""
        pieces = [samples[first:end] for first, end in self._pieces]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    @property
    def num_heard(self) -> int:
        """The number of samples of all pieces."""
        return sum(end - first for first, end in self._pieces)

    def piece_at(self, sample: int) -> tuple[int, Stretch]:
        """Returns the piece that holds a sample of the window, or the last one: the sample of the
        window at which it begins, and its samples of the channel."""
        placed = list(self._placed())
        return next((one for one in placed if sample < one[0] + one[1][1] - one[1][0]), placed[-1])

    def is_across(self, start: int, end: int, margin: int) -> bool:
        """Whether start .. end of the window has more than `margin` samples on both sides of a
        place where silence was left out."""
        return any(start + margin < at < end - margin for at, _ in self._placed())

    def parts(self, start: int) -> list[Self]:
        """Returns a window for each piece that is heard from sample `start` of this one on."""
        return [
            replace(self, first=first + max(start - at, 0), end=end, pieces=(), overlaps=False)
            for at, (first, end) in self._placed()
            if at + end - first > start
        ]

    @property
    def _pieces(self) -> tuple[Stretch, ...]:
        return self.pieces or ((self.first, self.end),)

    def _placed(self) -> Iterator[tuple[int, Stretch]]:
        """Yields pieces with the sample of the window at which each begins."""
        at = 0
        for first, end in self._pieces:
            yield at, (first, end)
            at += end - first


def windows_of(num_samples: int, size: int, overlap: int, channel: int = 0) -> Iterator[Window]:
    """Yields the windows of a channel, in order: all of `size` samples but the last.

    Each begins `overlap` samples before the end of the one before, but none lies in the one before.
    Raises ConfigError for an overlap of half a window or more.
    """
    if not 0 <= 2 * overlap < size:
        raise ConfigError("the overlap of windows must be 0 or more, and less than half a window")
    first = 0
    while True:
        end = min(first + size, num_samples)
        yield Window(first=first, end=end, channel=channel, overlaps=first > 0)
        if end == num_samples:
            return
        first = end - overlap


def heard_of(voices: Sequence[Stretch], num_samples: int, rate: int) -> list[Stretch]:
    """Returns the stretches that are heard of a channel: those in which somebody speaks, with
    PADDING around them, and silences between them and at both ends that are not longer than KEPT
    besides."""
    padding = round(PADDING * rate)
    found = list[Stretch]()
    for voice in voices:
        first, end = max(voice[0] - padding, 0), min(voice[1] + padding, num_samples)
        before = found[-1][1] if found else 0
        if first - before <= KEPT * rate:
            first = found.pop()[0] if found else 0
        found.append((first, end))
    if found and num_samples - found[-1][1] <= KEPT * rate:
        found[-1] = found[-1][0], num_samples
    return found


def spoken_within(start: int, end: int, voices: Sequence[Stretch]) -> Stretch:
    """Returns start .. end without the silence at both ends; as it is where nobody speaks in it."""
    own = voices[bisect_right(voices, start, key=itemgetter(1)) :]
    own = own[: bisect_left(own, end, key=itemgetter(0))]
    return (max(start, own[0][0]), min(end, own[-1][1])) if own else (start, end)


def windows_of_speech(
    heard: Sequence[Stretch], size: int, overlap: int, channel: int = 0
) -> Iterator[Window]:
    """Yields windows of the stretches that are heard, as many in each as fit into `size` samples. A
    longer stretch has windows of its own, as a recording of it alone would have."""
    kept = list[Stretch]()
    for first, end in heard:
        if kept and sum(b - a for a, b in kept) + end - first > size:
            yield _packed(kept, channel)
            kept = []
        if end - first <= size:
            kept.append((first, end))
            continue
        for own in windows_of(end - first, size, overlap, channel):
            yield replace(own, first=own.first + first, end=own.end + first)
    if kept:
        yield _packed(kept, channel)


def _packed(stretches: Sequence[Stretch], channel: int) -> Window:
    pieces = tuple(stretches) if len(stretches) > 1 else ()
    return Window(first=stretches[0][0], end=stretches[-1][1], channel=channel, pieces=pieces)
