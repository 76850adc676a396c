"""Finds the loop in which a text ended that was cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TAIL = 1024  # tokens at the end that are looked at
MAX_PERIOD = 200
FEWEST_TOKENS, FEWEST_TIMES = 64, 4  # of a loop: shorter ones are found in sound texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The last `period` tokens of a text, which stand there `times` times in a row or more."""

    period: int
    times: int

    def __str__(self) -> str:
        tokens = "token repeats" if self.period == 1 else f"{self.period} tokens repeat"
        return f"the last {tokens} {self.times} times"


def loop_of(token_ids: Sequence[int]) -> Loop | None:
    """Returns the loop with the shortest period at the end of a text, None without one."""
    import numpy as np  # which reports and commands without a model do not need

    tail = np.asarray(token_ids[-TAIL:], dtype=np.int64)
    for period in range(1, min(MAX_PERIOD, len(tail) // FEWEST_TIMES) + 1):
        differs = np.flatnonzero(tail[period:] != tail[:-period])
        begin = 0 if not len(differs) else int(differs[-1]) + 1
        length = len(tail) - begin
        if length >= max(FEWEST_TOKENS, FEWEST_TIMES * period):
            return Loop(period=period, times=length // period)
    return None
