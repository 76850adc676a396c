"""Tally: what was read of a sound file, and what was not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mmdeploy_llm.media.sound.clock import Clock

MAX_DAMAGED = 0.05  # share of the packets of a file that may be unreadable
MISSING = 0.02, 0.5  # share and seconds of the stated length from which on missing ones are noted


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts what is read of a file; its reader is the only writer.

    name: FFmpeg's of the format. num_whole, num_damaged: packets. seconds: that were read; stated:
    that the header says, 0 where it does not. share: see chunks.Link. tracks: languages of the
    sound tracks; track: the one that is read. clocks: of its parts. lost: seconds of damaged
    packets of files without times, in whose places silence stands; position: seconds before the
    next frame of such a file. num_files: that stand in the file one after the other.
    """

    name: str
    num_whole: int = 0
    num_damaged: int = 0
    seconds: float = 0.0
    stated: float = 0.0
    tracks: tuple[str, ...] = ()
    track: int = 0
    clocks: list[Clock] = field(default_factory=list)
    lost: float = 0.0
    position: float = 0.0
    share: float = 1.0
    num_files: int = 0

    def lost_until(self, seconds: float) -> float:
        """Returns the time of a frame of so many seconds in a file whose packets have none: after
        all before it, damaged ones included."""
        begin = self.position + self.lost
        self.position += seconds
        return begin

    @property
    def num_packets(self) -> int:
        """All packets."""
        return self.num_whole + self.num_damaged

    @property
    def is_corrupt(self) -> bool:
        """Whether more packets are damaged than may be. The end of a file that is cut off is
        one."""
        allowed = max(1, MAX_DAMAGED * self.num_whole) if self.num_whole else 0
        return self.num_damaged > allowed

    def notes(self) -> Iterator[str]:
        """Yields what a listener should know of a file that was read to its end."""
        if self.num_files > 1 and self.name != "ogg":
            yield f"{self.num_files} recordings stand in it, one after the other: all are heard"
        if len(self.tracks) > 1:
            yield (
                f"heard is sound track {self.track + 1} of {len(self.tracks)} "
                f"({', '.join(self.tracks)}); the others are left out"
            )
        for clock in self.clocks:
            yield from clock.notes()
        yield from self._lengths()
        if self.num_damaged:
            yield f"{self.num_damaged} of its {self.num_packets} packets are damaged and left out"

    def _lengths(self) -> Iterator[str]:
        """Yields what the header says wrongly of the length."""
        own = self.seconds - sum(clock.before for clock in self.clocks)
        skipped = sum(max(0.0, clock.began) for clock in self.clocks)  # before a file's own clock
        stated = self.stated if self.share == 1 else own * self.share
        share, most = MISSING
        allowed = max(most, share * stated)
        missing = stated - (own if self.share > 1 else self.seconds + skipped)
        if missing > allowed:
            yield (
                f"it ends after {self.seconds:.1f} s, though its header says {stated:.1f} s: "
                "it may be cut off"
            )
        elif stated and own - stated > allowed:
            yield f"it holds {own:.1f} s, though its header says {stated:.1f} s: all is heard"
