"""Interrupts: Ctrl-C in the program, and the signals by which schedulers (SIGTERM) and terminals
that close (SIGHUP) end it. The first one stops the command, a second one the process."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, NoReturn

from mmdeploy_llm.system.portable.signals import ENDINGS, HANG_UP

BY_SIGNAL = 128  # the exit code of a program that a signal ends is this and the signal's number
OUTPUTS = (1, 2)  # descriptors


class Terminated(KeyboardInterrupt):
    """The program was told to end by a signal that is not Ctrl-C."""


class Interrupts:
    """A context in which Ctrl-C ends the program with exit code 130, SIGTERM with 143, SIGHUP with
    129, and all of them without a traceback.

    A program ends by SystemExit: after another end of the block, the caller's handlers are back.

    The first Ctrl-C raises KeyboardInterrupt, which a command may handle: `batch` closes its output
    and says how to continue. The second one ends the process at once, with its worker processes and
    temporary files; so does any during the end of the program, and while torch is imported. Has no
    effect where the parent process ignores Ctrl-C for this one, such as a shell that starts it in
    the background. The same is true of the other signals: `nohup` ignores SIGHUP.
    """

    def __init__(self) -> None:
        self._is_pending = False
        self._is_ending = False
        self._number: int = signal.SIGINT  # of the signal that came last
        self._terminals: tuple[int, ...] = ()
        self._before: dict[signal.Signals, Any] = {}  # handlers of the caller

    def __enter__(self) -> Interrupts:
        usual = {signal.SIGINT: signal.default_int_handler}
        for number in ENDINGS:
            before = usual.get(number, signal.SIG_DFL)
            if signal.getsignal(number) is before:
                self._before[number] = before
                signal.signal(number, self._handle)
                sys.unraisablehook = self._raise_again
        self._terminals = tuple(filter(os.isatty, OUTPUTS))
        return self

    @property
    def exit_code(self) -> int:
        """The exit code of a program that was stopped."""
        return BY_SIGNAL + self._number

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
            end_now(self.exit_code)
        if not isinstance(error, SystemExit):
            self._leave()

    def _leave(self) -> None:
        """Gives the signals back to a process that called `main` and goes on."""
        for number, before in self._before.items():
            signal.signal(number, before)
        if sys.unraisablehook == self._raise_again:
            sys.unraisablehook = sys.__unraisablehook__

    def forget(self) -> None:
        """Counts the next Ctrl-C as the first one, after a command has handled the last one."""
        self._is_pending = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == HANG_UP:
            self._leave_terminal()
        self._number = number
        if self._is_pending or self._is_ending or _is_importing_torch(frame):
            end_now(self.exit_code)
        self._is_pending = True
        raise KeyboardInterrupt if number == signal.SIGINT else Terminated

    def _leave_terminal(self) -> None:
        """Drops what is written to a terminal that has closed, which would be an error."""
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nothing:
            for output in self._terminals:
                os.dup2(nothing.fileno(), output)

    def _raise_again(self, unraisable: Any) -> None:
        """Raises an interrupt again that was raised in a finalizer, where Python ignores it."""
        if not issubclass(unraisable.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(unraisable)
        elif not self._is_ending:
            self._is_pending = False
            _thread.interrupt_main(signal.Signals(self._number))


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


def _current() -> Interrupts | None:
    """Returns the program's Interrupts, if it runs within them."""
    for number in ENDINGS:
        owner = getattr(signal.getsignal(number), "__self__", None)
        if isinstance(owner, Interrupts):
            return owner
    return None


def forget_interrupt() -> None:
    """Calls `forget` of the program's Interrupts, if it runs within them."""
    if (own := _current()) is not None:
        own.forget()


def interrupted_code() -> int:
    """Returns the exit code of the program that was stopped: that of Ctrl-C without Interrupts."""
    own = _current()
    return BY_SIGNAL + signal.SIGINT if own is None else own.exit_code


def end_now(code: int) -> NoReturn:
    """Ends the process with its worker processes and temporary files, and waits for no thread;
    another signal ends even this. The interpreter's own end would report or ignore it."""
    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: os._exit(code))
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code)
