"""Lender: copies of objects that several threads must not share."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Thing = TypeVar("Thing")


class Lender(Generic[Thing]):
    """Lends each object to one thread at a time, and makes one more when all are in use.

    Some processors and tokenizers of transformers change their own state when they are called.
    """

    def __init__(self, make: Callable[[], Thing]) -> None:
        self._make = make
        self._free: queue.SimpleQueue[Thing] = queue.SimpleQueue()

    @contextmanager
    def lent(self) -> Iterator[Thing]:
        """Lends an object for the block."""
        try:
            thing = self._free.get_nowait()
        except queue.Empty:
            thing = self._make()
        try:
            yield thing
        finally:
            self._free.put(thing)
