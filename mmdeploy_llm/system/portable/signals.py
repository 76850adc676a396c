"""The signals that end a program, those of them that the system has."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

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
