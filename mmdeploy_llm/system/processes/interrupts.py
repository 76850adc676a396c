"""Delays Ctrl-C, and other signals that end a program, during operations that must not be
interrupted halfway."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from mmdeploy_llm.system.portable.signals import ENDINGS


@contextmanager
def interrupted_later() -> Iterator[None]:
    """Delays a Ctrl-C, or another signal that raises an interrupt, to the end of the block, so that
    another process does not receive half of a message, for example. A second one is raised at
    once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    found = {number: signal.getsignal(number) for number in ENDINGS}
    before: dict[signal.Signals, Callable[[int, FrameType | None], object]] = {
        number: handler for number, handler in found.items() if callable(handler)
    }
    received: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append((number, frame))
        if len(received) > 1:
            before[signal.Signals(number)](number, frame)

    for number in before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if len(received) == 1:
            before[signal.Signals(received[0][0])](*received[0])


def interrupt_thread(thread: threading.Thread) -> None:
    """Raises KeyboardInterrupt in another thread as soon as it runs Python code."""
    if thread.ident is not None:
        raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
        raise_in(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
