"""Clock: how far a run is, how fast it goes, and how many seconds are left.

What an item costs is learnt while the run goes on: seconds = a + b * size, fitted to the items that
have finished. Without sizes every item costs the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

FEWEST = 8  # finished items before seconds are estimated; at least half of those in progress, too
MOST_DONE = 0.8  # of an item in progress
PRIOR = 2.0  # items that the assumption weighs, that half of the seconds do not depend on the size


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A run at one moment.

    num_ended: items that finished in this run, with an answer or an error.
    num_left: items without a result; None when the number of items is unknown.
    elapsed: seconds since the run began.
    per_second: items per second.
    seconds_left: None as long as it cannot be estimated.
    """

    num_ended: int
    num_left: int | None
    elapsed: float
    per_second: float
    seconds_left: float | None


class Costs:
    """The seconds of an item of size 1, the mean, and of others: a + b * size, neither below 0."""

    def __init__(self) -> None:
        self._num = self._size = self._squares = self._seconds = self._products = 0.0

    @property
    def mean(self) -> float:
        """The mean seconds of the items so far."""
        return self._seconds / max(1.0, self._num)

    def add(self, size: float, seconds: float) -> None:
        """Learns from an item that has finished."""
        self._num += 1
        self._size += size
        self._squares += size * size
        self._seconds += seconds
        self._products += size * seconds

    def shares(self) -> tuple[float, float]:
        """Returns (a, b) in units of the mean seconds so far: least squares, with a prior that half
        of them go with the size."""
        size = self._size / max(1.0, self._num) or 1.0
        mean = self.mean or 1.0
        n, x = self._num + PRIOR, self._size / size
        xx = self._squares / size**2 + PRIOR
        y, xy = self._seconds / mean + PRIOR / 2, self._products / mean / size + PRIOR / 2
        determinant = n * xx - x * x  # positive: the prior makes it so
        a, b = (xx * y - x * xy) / determinant, (n * xy - x * y) / determinant
        return (max(a, 0.0), max(b, 0.0) / size) if a > 0 or b > 0 else (1.0, 0.0)


class Clock:
    """Counts the items of a run. One thread calls `begin`, and one `end`.

    total: items of the input, None when unknown. num_before: those that have a result already.
    mean_size: of all items; None: sizes are not known.
    """

    def __init__(
        self,
        total: int | None,
        num_before: int = 0,
        mean_size: float | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._left = None if total is None else max(0, total - num_before)
        self._mean_size = mean_size or 1.0
        self._is_sized = bool(mean_size)
        self._now = now
        self._start = now()
        self._begun: dict[str, tuple[float, float]] = {}  # key -> moment, size
        self._costs = Costs()
        self._num_ended = self._num_new = 0
        self._size_ended = self._size_new = 0.0

    def begin(self, key: str, size: int | None = None) -> None:
        """Notes when an item is handed to the engine."""
        relative = 1.0 if size is None or not self._is_sized else size / self._mean_size
        self._begun[key] = (self._now(), relative)

    def end(self, key: str, *, is_new: bool = True) -> None:
        """Counts an item that has finished. is_new: it had no result before."""
        now = self._now()
        begin, size = self._begun.pop(key, (now, 1.0))
        self._costs.add(size, now - begin)
        self._num_ended += 1
        self._size_ended += size
        self._num_new += is_new
        self._size_new += size * is_new

    def moment(self) -> Moment:
        """Returns where the run is now."""
        elapsed = self._now() - self._start
        left = None if self._left is None else max(0, self._left - self._num_new)
        is_known = self._num_ended >= max(FEWEST, len(self._begun) / 2) or left == 0
        return Moment(
            num_ended=self._num_ended,
            num_left=left,
            elapsed=elapsed,
            per_second=self._num_ended / max(elapsed, 1e-9),
            seconds_left=None if left is None or not is_known else self._rest(left) * elapsed,
        )

    def _rest(self, left: int) -> float:
        """Returns the cost of what is left, in costs of what has been done: more than none, as long
        as an item is left."""
        a, b = self._costs.shares()
        now, mean = self._now(), max(1e-9, self._costs.mean)
        begun = list(self._begun.values())  # another thread adds to them
        costs = [a + b * size for _, size in begun]
        ages = [(now - at) / mean for at, _ in begun]
        partly = sum(min(MOST_DONE * own, age) for own, age in zip(costs, ages, strict=True))
        size_begun = sum(size for _, size in begun)
        size_waiting = max(0.0, (self._left or 0) - self._size_new - size_begun)  # the mean is 1
        waiting = a * max(0, left - len(begun)) + b * size_waiting
        done = a * self._num_ended + b * self._size_ended + partly
        return (waiting + sum(costs) - partly) / max(1e-9, done)
