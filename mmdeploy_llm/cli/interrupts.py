"""Interrupts: Ctrl-C in the program. The first one stops the command, a second one the process."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, NoReturn

INTERRUPTED = 130  # exit code


class Interrupts:
    """A context in which Ctrl-C ends the program with exit code 130 and no traceback.

    The first Ctrl-C raises KeyboardInterrupt, which a command may handle: `batch` closes its output
    and says how to continue. The second one ends the process at once, with its worker processes and
    temporary files; so does any during the end of the program, and while torch is imported. Has no
    effect where the parent process ignores Ctrl-C for this one, such as a shell that starts it in
    the background.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._is_ending = False

    def __enter__(self) -> Interrupts:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            sys.unraisablehook = self._raise_again
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_ending = True
        is_usual = error is None or (isinstance(error, SystemExit) and not error.code)
        # Code that an interrupt broke may have raised another error because of it.
        if isinstance(error, KeyboardInterrupt) or (self._is_pending and not is_usual):
            end_now()

    def forget(self) -> None:
        """Counts the next Ctrl-C as the first one, after a command has handled the last one."""
        self._is_pending = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_pending or self._is_ending or _is_importing_torch(frame):
            end_now()
        self._is_pending = True
        raise KeyboardInterrupt

    def _raise_again(self, unraisable: Any) -> None:
        """Raises an interrupt again that was raised in a finalizer, where Python ignores it."""
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
        elif not self._is_ending:
            self._is_pending = False
            _thread.interrupt_main()


def _is_importing_torch(frame: FrameType | None) -> bool:
    """Whether the import of torch stands on the stack: its C++ code calls Python, and aborts the
    process where that raises."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if not getattr(spec, "_initializing", False):
        return False
    while frame is not None:
        name = frame.f_globals.get("__name__") or ""
        if frame.f_code.co_name == "<module>" and name.partition(".")[0] == "torch":
            return True
        frame = frame.f_back
    return False


def forget_interrupt() -> None:
    """Calls `forget` of the program's Interrupts, if it runs within them."""
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(owner, Interrupts):
        owner.forget()


def end_now() -> NoReturn:
    """Ends the process with its worker processes and temporary files, and waits for no thread;
    another Ctrl-C ends even this. The interpreter's own end would report or ignore it."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(INTERRUPTED)
