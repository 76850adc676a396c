"""FairLock: engines that share the cores of a CPU compute one after the other."""

from __future__ import annotations

import threading
from collections import deque


class FairLock:
    """A lock that threads get in the order in which they ask for it; threading.Lock may give it to
    the same thread again and again while others wait. A context manager.

    Writers: the threads that enter it, under `_lock`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_taken = False
        self._waiting: deque[threading.Lock] = deque()  # each is released to wake its thread

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_taken:
                self._is_taken = True
                return
            wake = threading.Lock()
            wake.acquire()
            self._waiting.append(wake)
        wake.acquire()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()  # the lock stays taken, by that thread now
            else:
                self._is_taken = False
