"""CallGuard: calls into plugins, none of which is waited for longer than it may take.

    intake thread --call--> helper thread --> the plugin
         |     <--answer--       |
         |                       +-- is used again for the next call
         +-- time is up: the call is left behind, its helper ends whenever the call does

A thread cannot be killed. One that hangs costs what it holds until it ends, so of each plugin only
a few are left behind; after that it is not called any more until one of them ends.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Generic, TypeVar

from mmdeploy_llm.errors import MediaError, MediaTimeoutError

Result = TypeVar("Result")
Inbox = SimpleQueue["Callable[[], object] | None"]

MAX_HUNG = 8  # calls of one plugin that are left behind
GRACE = 1.0  # seconds more, for plugins that keep the limit themselves: they can say why
LOOK_UP = 0.5  # seconds between two looks at whether anybody still wants the answer


class CallGuard:
    """Runs calls in daemon threads, as many as there are callers. Safe for use from several."""

    def __init__(self, max_hung: int = MAX_HUNG) -> None:
        self._max_hung = max_hung
        self._lock = threading.Lock()
        self._idle: list[Inbox] = []  # one helper each
        self._hung: Counter[str] = Counter()
        self._closed = threading.Event()
        # Also without `close` no helper outlives the object, but for those that hang.
        weakref.finalize(self, _end_all, self._idle)
        _at_program_end(weakref.WeakMethod(self.close))

    @property
    def num_hung(self) -> int:
        """Calls that were left behind and have not ended yet."""
        with self._lock:
            return self._hung.total()

    def run(self, call: Callable[[], Result], *, seconds: float, owner: str, late: str) -> Result:
        """What `call` returns or raises.

        owner: the plugin, for messages. late: the message of the MediaTimeoutError that is raised
        after `seconds` and a moment. Raises MediaError without a call where too many of `owner`
        hang, and at once when `close` is called or the program ends.
        """
        inbox = self._take(owner)
        answer: _Answer[Result] = _Answer()
        inbox.put(lambda: answer.fill(call))
        is_over = False
        try:
            is_over = self._is_over(answer, seconds)
        finally:
            if is_over:
                self._give_back(inbox)
            else:
                self._leave_behind(inbox, owner)
        if not is_over:
            raise MediaTimeoutError(late)
        return answer.result()

    def close(self) -> None:
        """Ends the helpers; who waits for a call gets a MediaError."""
        self._closed.set()
        with self._lock:
            _end_all(self._idle)

    def _is_over(self, answer: _Answer[Result], seconds: float) -> bool:
        """Waits for the answer; False when time is up."""
        end = time.monotonic() + seconds + GRACE
        while not answer.arrives(min(LOOK_UP, max(0.0, end - time.monotonic()))):
            if self._closed.is_set():
                raise MediaError("the engine was closed while this was prepared")
            if time.monotonic() >= end:
                return False
        return True

    def _take(self, owner: str) -> Inbox:
        with self._lock:
            if self._closed.is_set():
                raise MediaError("the engine is closed; make a new one")
            if self._hung[owner] >= self._max_hung:
                raise MediaError(
                    f"{owner} is not called: {self._hung[owner]} earlier calls of it hang. It is "
                    "called again when one of them ends; a new engine or program starts afresh, "
                    "blocked_plugins goes without it"
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

    def _leave_behind(self, inbox: Inbox, owner: str) -> None:
        with self._lock:
            self._hung[owner] += 1
        inbox.put(lambda: self._has_ended(owner))  # what the helper does once the call is over
        inbox.put(None)

    def _has_ended(self, owner: str) -> None:
        with self._lock:
            self._hung[owner] -= 1


class _Answer(Generic[Result]):
    """What a call returned or raised, for another thread."""

    def __init__(self) -> None:
        self._arrivals: SimpleQueue[None] = SimpleQueue()
        self._error: BaseException | None = None
        self._value: Result

    def fill(self, call: Callable[[], Result]) -> None:
        """Runs the call."""
        try:
            self._value = call()
        except BaseException as error:  # told to whoever asked
            self._error = error
        self._arrivals.put(None)

    def arrives(self, seconds: float) -> bool:
        """Whether it is there within `seconds`."""
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
            self._error = None  # error -> traceback -> this frame -> self would hold it for long


def _at_program_end(close: Callable[[], Callable[[], None] | None]) -> None:
    """Has `close()()` called before the program waits for its threads, which may wait for us.

    The interpreter waits for the threads of every ThreadPoolExecutor before it runs what `atexit`
    knows, and has no public way to be told earlier. Where there is none at all, the program ends
    when the time limits do.
    """
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(lambda: (closer := close()) and closer())


def _serve(inbox: Inbox) -> None:
    """A helper's life."""
    while (task := inbox.get()) is not None:
        task()
        del task  # and with it the media it was about, before the next wait


def _end_all(inboxes: list[Inbox]) -> None:
    while inboxes:
        inboxes.pop().put(None)
