"""The signals that end a program, those of them that the system has, and operations that they do
not interrupt halfway."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

# Ctrl-C, the end of a job, the end of its terminal. Each may reach all processes of a program at
# once.
HANG_UP = getattr(signal, "SIGHUP", None)
ENDINGS = tuple(number for number in (signal.SIGINT, signal.SIGTERM, HANG_UP) if number is not None)
# Those that code of others may use for itself.
OF_PROGRAMS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGALRM", signal.SIGINT))


@contextmanager
def unheard_by_children() -> Iterator[None]:
    """Blocks ENDINGS for this thread, and for a process that it starts in the block, until that
    process chooses to hear them: its parent handles them, and ends it. Where signals cannot be
    blocked, children.start gives the process a group of its own."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_endings() -> None:
    """Called in a child process: its parent handles ENDINGS, and ends it."""
    for number in ENDINGS:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)


def end_of(status: int) -> str:
    """Describes the exit status of a child process: "signal SIGSEGV"."""
    names = {-number.value: number.name for number in signal.Signals}
    return f"signal {names[status]}" if status in names else f"exit status {status}"


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
