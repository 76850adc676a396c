"""Finding: one line of the examination."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """The state of what was examined. absent: a library that only some uses need."""

    GOOD = "good"
    SLOW = "slow"
    ABSENT = "absent"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One examined thing. topic: its name. text: what was found, and what follows from it. advice:
    what to do about it, "" when there is nothing to do."""

    topic: str
    state: State
    text: str
    advice: str = ""
