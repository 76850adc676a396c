"""Ctrl-C that waits for the end of what must not be left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, such as a message of which another process would have
    the first half only. A second one does not wait: it is raised in the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # where signals never arrive
        return
    before = signal.getsignal(signal.SIGINT)
    received: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))
        if len(received) > 1 and callable(before):
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(received) == 1 and callable(before):
            before(*received[0])
