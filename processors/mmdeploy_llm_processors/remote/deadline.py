"""One deadline for all operations of fetching an item. Operations without a timeout argument, such
as looking up a name, are bounded by the deadline that the caller of every fetcher keeps."""

from __future__ import annotations

import time

from mmdeploy_llm.errors import MediaTimeoutError


class Deadline:
    """A point in time, `seconds` from now. name: names the item in messages."""

    def __init__(self, seconds: float, name: str) -> None:
        self._seconds = seconds
        self._name = name
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Returns the seconds until the deadline, above 0. Raises MediaTimeoutError after it."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    def has(self, seconds: float) -> bool:
        """Returns whether more than `seconds` are left."""
        return self._end - time.monotonic() > seconds

    def error(self) -> MediaTimeoutError:
        """Builds the error for a missed deadline."""
        return MediaTimeoutError(
            f"{self._name} was not fetched within {self._seconds:g} s; raise media_fetch_timeout"
        )
