"""Delays Ctrl-C during operations that must not be interrupted halfway."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Delays a Ctrl-C to the end of the block, so that another process does not receive half of a
    message, for example. A second Ctrl-C is raised at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
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


@contextmanager
def unheard_by_children() -> Iterator[None]:
    """Blocks Ctrl-C for this thread, and for a process that it starts in the block, until that
    process chooses to hear it: a terminal sends Ctrl-C to all processes of a program."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def interrupt_thread(thread: threading.Thread) -> None:
    """Raises KeyboardInterrupt in another thread as soon as it runs Python code."""
    if thread.ident is not None:
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
