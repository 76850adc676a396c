"""One deadline for everything that fetching an item takes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from mmdeploy_llm.errors import MediaTimeoutError

Result = TypeVar("Result")


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

    def run(self, call: Callable[[], Result]) -> Result:
        """What `call` returns or raises, for calls that have no time limit of their own.

        They run in a thread, which is left behind when time is up: it ends when the call does.
        Raises MediaTimeoutError.
        """
        answers: SimpleQueue[_Answer[Result]] = SimpleQueue()
        left = self.left()
        threading.Thread(target=lambda: answers.put(_Answer(call)), daemon=True).start()
        try:
            return answers.get(timeout=left).result()
        except Empty:
            raise self.error() from None


class _Answer(Generic[Result]):
    """What a call returned or raised, for another thread."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._error: Exception | None = None
        try:
            self._value = call()
        except Exception as error:
            self._error = error

    def result(self) -> Result:
        if self._error is not None:
            raise self._error
        return self._value
