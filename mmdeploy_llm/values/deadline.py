"""Deadline: the moment at which a request ends with error 408, wherever it is."""

from __future__ import annotations

import numbers
import time
from dataclasses import dataclass
from typing import Any, Self

from mmdeploy_llm.errors import RequestError, RequestTimeoutError

from .text.display import shown

LONGEST = 366 * 86400.0  # seconds; locks and clocks of the system overflow far above it


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The end of the time that a caller gave a request.

    seconds: as the caller gave them. end: in seconds of `time.monotonic` in this process; a pickled
    deadline carries the seconds that are left, because processes need not share that clock.
    """

    seconds: float
    end: float

    @classmethod
    def after(cls, timeout: Any, now: float | None = None) -> Self:
        """Returns the deadline `timeout` seconds after `now`, by default this moment. Raises
        RequestError unless timeout is a number above 0 and at most LONGEST."""
        is_number = isinstance(timeout, numbers.Real) and not isinstance(timeout, bool)
        if not is_number or not 0 < timeout <= LONGEST:
            raise RequestError(
                "timeout must be a number of seconds above 0 and at most "
                f"{LONGEST:.0f} (a year), got {shown(timeout)}; leave it out for no limit"
            )
        seconds = float(timeout)
        return cls(seconds=seconds, end=(time.monotonic() if now is None else now) + seconds)

    @property
    def left(self) -> float:
        """Seconds until the end, negative after it."""
        return self.end - time.monotonic()

    def check(self, state: str) -> None:
        """Raises `error(state)` after the end."""
        if self.left <= 0:
            raise self.error(state)

    def error(self, state: str) -> RequestTimeoutError:
        """Builds the error of a request that is late. state: of the request, such as "it waited to
        be prepared"."""
        return RequestTimeoutError(
            f"the request was not finished within its timeout of {self.seconds:g} s: {state}; "
            "raise timeout or leave it out"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.seconds, self.left)


def earlier(one: Deadline | None, other: Deadline | None) -> Deadline | None:
    """Returns the earlier of two deadlines, of which None is the latest."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=lambda deadline: deadline.end)


def _restored(seconds: float, left: float) -> Deadline:
    return Deadline(seconds=seconds, end=time.monotonic() + left)
