"""Pace: how long steps take, and how many drafts make them faster."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .lookup import MAX_DRAFTS

NUM_TIMES = 3  # measured times of which the shortest counts: one hiccup changes nothing
MIN_TIMES = 2  # fewer count as unknown
MAX_AGE = 256  # steps after which times of steps with drafts are measured again
PLAIN_EVERY = 64  # steps after which one without drafts is measured again
MAX_LOSS = 0.02  # share of the time that drafts may cost
FIRST_LOSS = 1.0  # steps without drafts, whose time they may cost at once
MIN_GAIN = 1.02  # expected speed, relative to none, from which on drafts are computed


@dataclass(slots=True, kw_only=True)
class Times:
    """The last times of steps of one size, in seconds. Writer: Pace."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    step: int = 0  # number of the last one

    @property
    def shortest(self) -> float | None:
        """The shortest of them; None while there are too few."""
        return min(self.seconds) if len(self.seconds) >= MIN_TIMES else None

    def add(self, seconds: float, step: int) -> None:
        """Records the time of a step."""
        self.seconds.append(seconds)
        self.step = step


class Pace:
    """Measured times of decode steps, and what drafts have lost. Writer: Speculation.

    Steps with drafts are assumed to take no longer than those without until two have been measured.
    An account bounds what wrong assumptions cost: a step with drafts is debited with its time and
    credited with the time that its tokens would have taken one by one; every step credits MAX_LOSS
    of its time. Below -FIRST_LOSS steps there are no drafts.
    """

    def __init__(self) -> None:
        self._plain: dict[int, Times] = {}  # by number of requests
        self._drafted: dict[int, Times] = {}  # by rows, in classes
        self._loss = 0.0  # seconds
        self._num_steps = 0

    def observe(self, seconds: float, *, num_requests: int, num_rows: int, num_tokens: int) -> None:
        """Records a decode step. num_rows: tokens computed; num_tokens: tokens generated."""
        self._num_steps += 1
        if num_rows == num_requests:
            times = self._plain.setdefault(num_requests, Times())
        else:
            times = self._drafted.setdefault(_class_of(num_rows), Times())
        times.add(seconds, self._num_steps)
        plain = self._plain_time(num_requests)
        if num_rows > num_requests and plain is not None:
            cost = times.shortest or seconds  # one hiccup is not the fault of drafts
            self._loss += cost - plain * num_tokens / num_requests
        self._loss = max(0.0, self._loss - MAX_LOSS * seconds)

    def best_length(self, num_requests: int, guesses: Sequence[tuple[float, int]]) -> int:
        """Returns the number of drafts per request, 0 to MAX_DRAFTS, that makes the next step
        generate most tokens per second.

        guesses: of each request with a guess, the probability that a token is right and the length.
        """
        plain = self._plain_time(num_requests)
        if plain is None or self._loss > FIRST_LOSS * plain:
            return 0
        if self._num_steps - self._plain[num_requests].step > PLAIN_EVERY:
            return 0
        best, gain = 0, MIN_GAIN
        num_rows, num_tokens = num_requests, float(num_requests)
        for length in range(1, MAX_DRAFTS + 1):
            longer = [rate for rate, size in guesses if size >= length]
            num_rows += len(longer)
            num_tokens += sum(rate**length for rate in longer)
            speed = num_tokens / num_requests * plain / self._drafted_time(num_rows, plain)
            if longer and speed > gain:
                best, gain = length, speed
        return best

    def _plain_time(self, num_requests: int) -> float | None:
        times = self._plain.get(num_requests)
        return None if times is None else times.shortest

    def _drafted_time(self, num_rows: int, plain: float) -> float:
        """Returns the time of a step with drafts: no less than smaller ones take."""
        known = plain
        for rows, times in self._drafted.items():
            if rows <= _class_of(num_rows) and self._num_steps - times.step <= MAX_AGE:
                known = max(known, times.shortest or 0.0)
        return known


def _class_of(num_rows: int) -> int:
    """Returns num_rows, above 8 rounded up to a multiple of 8."""
    return num_rows if num_rows <= 8 else -(-num_rows // 8) * 8
