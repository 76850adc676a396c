"""One deadline for everything that fetching an item takes. What has no time limit of its own, such
as looking up a name, ends with the limit that the caller of every fetcher keeps."""

from __future__ import annotations

import time

from mmdeploy_llm.errors import MediaTimeoutError


class Deadline:
    """A point in time, `seconds` from now. name: of what must be done by then, for messages."""

    def __init__(self, seconds: float, name: str) -> None:
        self._seconds = seconds
        self._name = name
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the deadline, above 0. Raises MediaTimeoutError once it has passed."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise self.error()
        return left

    def has(self, seconds: float) -> bool:
        """Whether more than so many seconds are left."""
        return self._end - time.monotonic() > seconds

    def error(self) -> MediaTimeoutError:
        """What is raised when time is up."""
        return MediaTimeoutError(
            f"{self._name} was not fetched within {self._seconds:g} s; raise media_fetch_timeout"
        )
