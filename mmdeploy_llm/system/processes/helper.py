"""Helper: calls in a child process that is killed when it does not answer in time.

    caller --job--> Helper --Worker--> child: the entry function, which answers in frames

The child starts at the first call. What it answers is never unpickled: it computes with what
strangers wrote. After a call that failed, the next one starts another child.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

from mmdeploy_llm.errors import EngineError, WorkerDiedError
from mmdeploy_llm.system.portable.limits import address_space, set_limit, tell_what_is_unlimited

from .frames import Frame
from .process import READY, Channel, Worker

START_SECONDS = 60.0
MAX_ANSWER = 2**20  # bytes


class Helper:
    """Calls a child process, which several threads use one after the other.

    name: name of the process in messages.
    entry: a picklable function that runs in the child: it receives `setup`, calls `channel.ready`,
        and then answers each job that it receives.
    max_answer: bytes of the largest answer, or of the largest buffer of a frame.
    """

    def __init__(
        self,
        name: str,
        entry: Callable[[Channel], None],
        setup: Any,
        max_answer: int = MAX_ANSWER,
    ) -> None:
        self._name = name
        self._max_answer = max_answer
        self._entry = entry
        self._setup = setup
        self._turn = threading.Lock()  # held during a call
        self._lock = threading.Lock()  # guards the fields below
        self._worker: Worker | None = None
        self._is_ready = False
        self._is_closed = False

    @property
    def is_running(self) -> bool:
        """Whether there is a child, which may have answered calls before."""
        return self._worker is not None

    def start(self) -> None:
        """Starts the child without waiting for it. Raises EngineError when this is closed."""
        with self._turn:
            self._spawned()

    def call(self, job: Any, seconds: float) -> bytes:
        """Returns the child's answer. Raises TimeoutError after `seconds`, which exclude the
        child's start; WorkerDiedError when it died or answered nonsense; EngineError when it does
        not start or this object is closed."""
        answer = b""
        for frame in self.stream(job, seconds):
            answer = b"".join(frame.buffers)
        return answer

    def stream(self, job: Any, seconds: float) -> Generator[Frame, None, None]:
        """Yields the frames that the child answers, up to the one without a text, which is the
        last and is left out if it is empty. Raises as `call` does; seconds: of waiting in all."""
        with self._turn:
            is_sound = False
            try:
                worker = self._started()
                worker.send(job)
                while True:
                    frame = worker.receive_frame(seconds, self._max_answer)
                    seconds, is_sound = frame.seconds_left, not frame.text
                    if frame.text or frame.buffers:
                        yield frame
                    if is_sound:
                        return
            except WorkerDiedError:
                self._check_open()
                raise
            finally:
                if not is_sound:
                    self._drop()

    def end_child(self) -> None:
        """Ends the child, whose next call starts another; for one that is not sound any more."""
        with self._turn:
            self._drop()

    def interrupt(self) -> None:
        """Ends a call that is under way and refuses later ones; may be called from any thread."""
        with self._lock:
            self._is_closed = True
            if self._worker is not None:
                self._worker.interrupt()

    def close(self) -> None:
        """Ends the process."""
        self.interrupt()
        with self._turn:
            self._drop()

    def _spawned(self) -> Worker:
        """Returns the process, a new one if need be, which may still be starting."""
        if self._worker is not None:
            return self._worker
        with self._lock:
            self._check_open()
            tell_what_is_unlimited()
            worker = self._worker = Worker(self._name, self._entry, is_quiet=True)
            self._is_ready = False
        worker.send(self._setup)
        return worker

    def _started(self) -> Worker:
        """Returns the process once it is ready."""
        worker = self._spawned()
        if self._is_ready:
            return worker
        with contextlib.suppress(TimeoutError, WorkerDiedError):
            self._is_ready = worker.receive_frame(START_SECONDS, 0).text == READY
        if not self._is_ready:
            self._check_open()
            raise EngineError(f"the process {self._name!r} does not start")
        return worker

    def _drop(self) -> None:
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.kill()

    def _check_open(self) -> None:
        if self._is_closed:
            raise EngineError("this LLM is closed; make a new one")


def limit_memory(more: int) -> None:
    """Limits the address space of this process to what it has now and `more` bytes, where the
    system supports that, and writes no core files."""
    now = address_space()
    if now is not None:
        set_limit("memory", now + more)
    set_limit("core", 0)


def drop_outputs() -> None:
    """Drops what this process writes: codecs write what they find wrong, and Rust where it panics,
    and where memory or stack run out, and that is the error of one item."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
