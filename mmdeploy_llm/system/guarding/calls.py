"""CallGuard: calls plugins and never waits for a call longer than it may take.

    intake thread --call--> helper thread --> the plugin
         |     <--answer--       |
         |                       +-- used again for the next call
         +-- timeout: the call is abandoned, its helper ends whenever the call does

A thread cannot be killed. One that hangs keeps what it holds until it ends, so only a few calls of
each plugin are abandoned; after that the plugin is not called until one of them ends. Calls that a
request's deadline ends early are no fault of the plugin: as few of them are abandoned, but the next
ones wait for their full time.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from mmdeploy_llm.errors import MediaError, MediaTimeoutError
from mmdeploy_llm.system.processes import finalize_here
from mmdeploy_llm.values.deadline import Deadline

Result = TypeVar("Result")
Inbox = SimpleQueue["Callable[[], object] | None"]

MAX_HUNG = 8  # abandoned calls of one plugin
GRACE = 1.0  # extra seconds, so that a plugin with its own deadline can report the reason
POLL_INTERVAL = 0.5  # seconds between two checks whether the guard was closed


class CallGuard:
    """Runs calls in daemon threads, one per concurrent caller. Thread-safe."""

    def __init__(self, max_hung: int = MAX_HUNG) -> None:
        self._max_hung = max_hung
        self._lock = threading.Lock()
        self._idle: list[Inbox] = []  # one helper each
        self._hung: Counter[str] = Counter()
        self._late: Counter[str] = Counter()  # abandoned at the deadline of their request
        self._closed = threading.Event()
        # Without `close`, too, no helper outlives the object, except those that hang.
        finalize_here(self, _end_all, self._idle)
        _at_program_end(weakref.WeakMethod(self.close))

    @property
    def num_hung(self) -> int:
        """Number of abandoned calls that have not ended yet."""
        with self._lock:
            return self._hung.total() + self._late.total()

    def run(
        self,
        call: Callable[[], Result],
        *,
        seconds: float,
        owner: str,
        timeout_message: str,
        deadline: Deadline | None = None,
    ) -> Result:
        """Returns or raises what `call` does.

        owner: the plugin, for messages.
        timeout_message: message of the MediaTimeoutError that is raised after `seconds` and a short
            grace period, or at `deadline`.

        Raises MediaError without a call where too many calls of `owner` hang, and immediately when
        `close` is called or the program ends.
        """
        inbox = self._take(owner)
        answer: _Answer[Result] = _Answer()
        inbox.put(lambda: answer.fill(call))
        end = time.monotonic() + seconds + GRACE
        is_done, abandoned = False, self._hung
        try:
            if deadline is None or end <= deadline.end:
                is_done = self._wait(answer, end)
            elif not (is_done := self._wait(answer, deadline.end)):
                if self._can_be_late(owner):
                    abandoned = self._late
                else:
                    is_done = self._wait(answer, end)
        finally:
            if is_done:
                self._give_back(inbox)
            else:
                self._abandon(inbox, owner, abandoned)
        if not is_done:
            raise MediaTimeoutError(timeout_message)
        return answer.result()

    def close(self) -> None:
        """Ends the helpers; callers that wait get a MediaError."""
        self._closed.set()
        with self._lock:
            _end_all(self._idle)

    def _can_be_late(self, owner: str) -> bool:
        with self._lock:
            return self._late[owner] < self._max_hung

    def _wait(self, answer: _Answer[Result], end: float) -> bool:
        """Waits for the answer until `end`, of the monotonic clock; returns False on timeout."""
        while not answer.arrives(min(POLL_INTERVAL, max(0.0, end - time.monotonic()))):
            if self._closed.is_set():
                raise MediaError("the engine was closed while this item was prepared")
            if time.monotonic() >= end:
                return False
        return True

    def _take(self, owner: str) -> Inbox:
        with self._lock:
            if self._closed.is_set():
                raise MediaError("the engine is closed; create a new one")
            if self._hung[owner] >= self._max_hung:
                raise MediaError(
                    f"{owner} is not called: {self._hung[owner]} earlier calls of it hang. It is "
                    "called again when one of them ends; start a new engine or program, or turn "
                    "the plugin off with blocked_plugins"
                )
            if self._idle:
                return self._idle.pop()
        inbox: Inbox = SimpleQueue()
        threading.Thread(target=_serve, args=(inbox,), name="guarded", daemon=True).start()
        return inbox

    def _give_back(self, inbox: Inbox) -> None:
        with self._lock:
            if self._closed.is_set():
                inbox.put(None)
            else:
                self._idle.append(inbox)

    def _abandon(self, inbox: Inbox, owner: str, abandoned: Counter[str]) -> None:
        """Counts the call in `abandoned` until it ends, as does its helper."""
        with self._lock:
            abandoned[owner] += 1
        # The helper runs this once the call has ended.
        inbox.put(lambda: self._has_ended(owner, abandoned))
        inbox.put(None)

    def _has_ended(self, owner: str, abandoned: Counter[str]) -> None:
        with self._lock:
            abandoned[owner] -= 1


class _Answer(Generic[Result]):
    """Result or exception of a call, for another thread."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None
        self._value: Result

    def fill(self, call: Callable[[], Result]) -> None:
        """Runs the call and stores its result or exception."""
        try:
            self._value = call()
        except BaseException as error:  # raised again in the caller's thread
            self._error = error
        self._arrivals.put(None)

    def arrives(self, seconds: float) -> bool:
        """Waits up to `seconds`; returns whether the answer is available."""
        try:
            self._arrivals.get(timeout=seconds)
        except Empty:
            return False
        return True

    def result(self) -> Result:
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            self._error = None  # breaks the cycle error -> traceback -> this frame -> self


def _at_program_end(close: Callable[[], Callable[[], None] | None]) -> None:
    """Registers `close()()` to run before the interpreter waits for its threads.

    The interpreter waits for the threads of every ThreadPoolExecutor, which may wait for us, before
    it runs `atexit` callbacks, and has no public callback that runs earlier. Where the private one
    is missing, the program ends when the time limits expire. In a forked process, whose copy of the
    lock may be held for ever, there are no such threads.
    """
    register, process = getattr(threading, "_register_atexit", None), os.getpid()
    if register is not None:
        register(lambda: os.getpid() == process and (closer := close()) and closer())


def _serve(inbox: Inbox) -> None:
    """Runs a helper thread: one task after the other until None arrives."""
    while (task := inbox.get()) is not None:
        task()
        del task  # frees its media before the next wait


def _end_all(inboxes: list[Inbox]) -> None:
    while inboxes:
        inboxes.pop().put(None)
