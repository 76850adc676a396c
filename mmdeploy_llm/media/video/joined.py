"""Recordings that were joined: the clock of a file begins anew, once or several times.

    times in the file  0 1 2 3 4 5 | 0 1 2 3
    times that we use  0 1 2 3 4 5 | 6 7 8 9      as players show them, one after the other

A key frame comes after all frames that stand before it in a file. Where its time does not, or where
the times of decoding fall back, another recording begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mmdeploy_llm.media.sound.clock import LEAST_BACK, NEW_CLOCK


@dataclass(frozen=True, slots=True, kw_only=True)
class Packet:
    """The times of a packet, which holds one frame, and whether it is a key frame."""

    pts: int | None
    dts: int | None
    is_key: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The frames of all recordings of a file, in the order in which they are shown.

    places: time in the file -> places of its frames, ascending. times: seconds, the first 0. jumps:
    where a new clock begins, in seconds, and by how many it jumps. num_first: frames of the first
    recording.
    """

    places: Mapping[int, Sequence[int]]
    times: Sequence[float]
    jumps: Sequence[tuple[float, float]]
    num_first: int

    def place_of(self, pts: int | None, *, after: int) -> int | None:
        """Returns the first place after another one of a frame with this time; None without one."""
        found = () if pts is None else self.places.get(pts, ())
        return next((place for place in found if place > after), None)

    def note(self) -> str:
        """Returns what a viewer should know."""
        moment, seconds = self.jumps[0]
        more = f", and {len(self.jumps) - 1} times more" if len(self.jumps) > 1 else ""
        return (
            f"the video's clock jumps by {seconds:.2f} s after {moment:.2f} s{more}: times from "
            "there on are counted"
        )


def joined(
    packets: Iterable[Packet], unit: float, length: float, *, may_leap: bool
) -> Joined | None:
    """Returns the frames of a file whose clock begins anew; None where it does not.

    unit: seconds of a unit of the packets' times. length: seconds of a frame. may_leap: whether a
    clock that jumps ahead by NEW_CLOCK seconds is a new one, as for sound.
    """
    recordings = _recordings(packets, unit, may_leap=may_leap)
    if len(recordings) < 2:
        return None
    places: dict[int, list[int]] = {}
    times: list[float] = []
    jumps: list[tuple[float, float]] = []
    begin, before = 0.0, 0
    for number, recording in enumerate(recordings):
        own = sorted(recording)
        if number:
            jumps.append((begin, (own[0] - before) * unit - length))
        for pts in own:
            places.setdefault(pts, []).append(len(times))
            times.append(begin + (pts - own[0]) * unit)
        begin, before = times[-1] + length, own[-1]
    return Joined(places=places, times=times, jumps=jumps, num_first=len(recordings[0]))


def _recordings(packets: Iterable[Packet], unit: float, *, may_leap: bool) -> list[set[int]]:
    """Returns the times of the frames of each recording."""
    found: list[set[int]] = []
    latest, decoded = 0, None
    for packet in packets:
        if packet.pts is None:
            continue
        is_new = not found or (packet.is_key and packet.pts <= latest)
        if decoded is not None and packet.dts is not None:
            step = (packet.dts - decoded) * unit
            is_new = is_new or step <= -LEAST_BACK or (may_leap and step > NEW_CLOCK)
        if is_new:
            found.append(set())
            latest = packet.pts
        found[-1].add(packet.pts)
        latest, decoded = max(latest, packet.pts), packet.dts
    return found
