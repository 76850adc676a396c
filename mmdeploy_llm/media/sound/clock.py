"""Keeps the samples of a file at the times at which players play them.

    picture  |===========================================
    sound         |=======|      |============|
    samples  00000|=======|000000|============|      0: silence that stands where nothing is

A file of packets with times of their own may begin its sound after its picture, and lack packets.
Silence takes these places, so that a sample's number says its time. Samples are never removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

# Formats whose packets say when they are played; in others samples follow one another.
WITH_CLOCK = frozenset(("mp4", "matroska", "flv", "asf", "mpegts", "mpeg", "ogg", "flac"))
# What FFmpeg reads of the times of these is not that of a whole stream.
WITHOUT_CLOCK_IN_OGG = frozenset(("flac", "speex"))
RESTARTS = frozenset(("mpegts", "mpeg"))  # whose clocks may begin anew within a file
NEW_CLOCK = 10.0  # seconds of a jump that is a new clock there, as in FFmpeg's programs
LEAST_START = 0.002  # seconds before a sound; less is the rounding of times
LEAST_GAP = 0.015  # less than one packet of speech; times in milliseconds vary by less
LEAST_STEP = 0.01  # seconds between two packets where one is missing
MOST_DRIFT = 0.3  # seconds by which times that run a little faster than samples are ahead
LEAST_BACK = 0.5  # seconds that times run back by, where their clock begins anew


@dataclass(slots=True, kw_only=True)
class Clock:
    """Holds the times that a file states against the number of its samples.

    zero: the file's time of the first moment that players show. most: seconds of a gap that are
    filled; after a longer one the clock counts as a new one. Written by its reader alone. before:
    seconds of silence before the sound. gaps, jumps: moments and seconds. began: zero as it was.
    following: the file's time at which the samples so far end.
    """

    zero: float
    most: float
    position: float = 0.0
    before: float = 0.0
    began: float = field(init=False)
    gaps: list[tuple[float, float]] = field(default_factory=list)
    jumps: list[tuple[float, float]] = field(default_factory=list)
    has_begun: bool = False
    following: float = 0.0

    def __post_init__(self) -> None:
        self.began = self.zero

    def silence_before(self, time: float) -> float:
        """Returns the seconds of silence that come before samples with this time in the file."""
        late = time - self.zero - self.position
        least = LEAST_GAP if self.has_begun else LEAST_START
        is_first, self.has_begun = not self.has_begun, True
        is_hole = is_first or time - self.following >= LEAST_STEP or late >= MOST_DRIFT
        self.following = time
        if late > self.most or late <= -LEAST_BACK:
            self.zero += late
            self.jumps.append((self.position, late))
        elif late >= least and is_hole:
            self.position += late
            if is_first:
                self.before = late
            else:
                self.gaps.append((self.position - late, late))
            return late
        return 0.0

    def heard(self, seconds: float) -> None:
        """Counts samples."""
        self.position += seconds
        self.following += seconds

    def notes(self) -> Iterator[str]:
        """Yields what a listener should know."""
        if self.before >= 0.1:
            yield f"its sound begins after {self.before:.2f} s; silence stands there"
        if (missing := sum(seconds for _, seconds in self.gaps)) >= 0.1:
            places = "a gap" if len(self.gaps) == 1 else f"{len(self.gaps)} gaps"
            first = self.gaps[0][0]
            yield f"{places} of {missing:.2f} s in all, from {first:.2f} s on; silence stands there"
        if self.jumps:
            moment, seconds = self.jumps[0]
            more = f", and {len(self.jumps) - 1} times more" if len(self.jumps) > 1 else ""
            yield (
                f"its clock jumps by {seconds:.2f} s after {moment:.2f} s{more}: times from there "
                "on are counted"
            )
