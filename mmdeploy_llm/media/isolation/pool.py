"""The pool of worker processes: calls a function in one and streams its results back."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mmdeploy_llm import errors
from mmdeploy_llm.errors import MediaError, MediaTimeoutError, RequestError
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.hooks.files import file_of
from mmdeploy_llm.system.portable import children, limits, signals

from .wire import PeerGoneError, receive, send

START_TIMEOUT = 60.0  # extra seconds for the first answer, which includes the process start
LAST_SECONDS = 0.1  # to receive an answer that came in the last moment
MAX_REPLY = 2**31  # bytes of one array
BOUNDS = ("max_bytes", "max_pixels", "max_frames", "max_duration")  # limits that a codec checks

Answer = tuple[Mapping[str, Any], "np.ndarray | None"]
# A function at the top level of a module or of a plugin's single file, or "module:function".
Function = str | Callable[..., Iterable[Any]]


class _ReportedError(Exception):
    """The function raised `error` in its worker; the worker can be reused."""

    def __init__(self, error: RequestError) -> None:
        super().__init__()
        self.error = error


class _Worker:
    """A worker process and the socket to it. Used by one thread at a time."""

    def __init__(self) -> None:
        limits.tell_what_is_unlimited()
        child = children.start(
            [sys.executable, "-m", f"{__package__}.worker"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._process, self.peer = child.process, child.peer
        self._lifeline: int | None = child.lifeline
        self.is_fresh = True

    def kill(self) -> int:
        """Kills the process; returns its exit status."""
        self.peer.close()
        self._process.kill()
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
        return self._process.wait()

    def ended_by(self) -> str:
        """Describes how the process ended; kills it if it has not."""
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            status = self.kill()
        return signals.end_of(status)


class Workers:
    """A pool of worker processes, started on demand. Safe for use from several threads.

    At most one process runs for each thread that calls `stream`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._is_closed = False
        # No process outlives the object, even without `close`.
        self._finalizer = weakref.finalize(self, _kill_all, self._idle, os.getpid())

    def stream(
        self,
        function: Function,
        blob: bytes,
        args: Mapping[str, Any],
        *,
        timeout: float,
        max_memory: int,
    ) -> Iterator[Answer]:
        """Runs the generator function(blob, **args) in a worker and yields its pairs.

        function: at the top level of its module, which the worker's Python can import or which is a
        plugin's single file; or its name, "module:function". args and the first of each pair are
        JSON values; the second is a uint8 array or None.
        timeout: total seconds of waiting for the worker. max_memory: bytes. Raises the RequestError
        that the function raised, MediaTimeoutError when time is up, MediaError when the process
        dies.
        """
        name = _name_of(function)
        file = file_of(name.partition(":")[0])
        call = {"function": name, "file": None if file is None else str(file)}
        worker = self._take()
        is_sound = False
        try:
            yield from self._answers(
                worker,
                {**call, "args": dict(args), "max_memory": max_memory},
                blob,
                timeout,
            )
            is_sound = True
        except _ReportedError as reported:
            is_sound = True
            raise reported.error from None
        finally:
            self._give_back(worker, is_sound)

    def decode(
        self, function: Function, blob: bytes, limits: MediaLimits, **args: Any
    ) -> Iterator[Answer]:
        """Calls `stream` with the timeout and memory limit of one item. The function also gets the
        item's other limits as `limits`, a dict for MediaLimits(**limits)."""
        bounds = {name: getattr(limits, name) for name in BOUNDS}
        return self.stream(
            function,
            blob,
            {"limits": bounds, **args},
            timeout=limits.decode_timeout,
            max_memory=limits.decode_memory,
        )

    def max_seconds(self, limits: MediaLimits) -> float:
        """Returns the seconds for a processor's call that uses `decode` once or twice: the start of
        a process, then its timeout once for the process and once for the processor's own work."""
        return START_TIMEOUT + 2 * limits.decode_timeout

    def close(self) -> None:
        """Ends all idle workers; busy ones end with their call."""
        with self._lock:
            self._is_closed = True
        self._finalizer()

    def _answers(
        self, worker: _Worker, call: Mapping[str, Any], blob: bytes, timeout: float
    ) -> Iterator[Answer]:
        left = timeout + (START_TIMEOUT if worker.is_fresh else 0.0)
        try:
            worker.peer.settimeout(left)
            send(worker.peer, call, blob)
            while True:
                rest = children.left_after_waiting(worker.peer, left)
                if rest is None:
                    raise TimeoutError
                begin, left = time.monotonic(), rest
                worker.peer.settimeout(max(left, LAST_SECONDS))
                fields, payload = receive(worker.peer, MAX_REPLY)
                left -= time.monotonic() - begin
                if worker.is_fresh:
                    worker.is_fresh, left = False, min(left, timeout)
                if "error" in fields:
                    raise _reported(fields)
                if "done" in fields:
                    return
                yield fields["fields"], _array(fields["shape"], payload)
                if left <= 0:  # what came in time was given
                    raise TimeoutError
        except TimeoutError:
            raise MediaTimeoutError(
                f"decoding took longer than the {timeout:g} seconds that are allowed; raise "
                "media_timeout or give a simpler file"
            ) from None
        except PeerGoneError:
            raise MediaError(
                f"the process that decoded it died ({worker.ended_by()}); it is probably corrupt"
            ) from None
        except ValueError:
            raise MediaError("the process that decoded it sent an invalid answer") from None

    def _take(self) -> _Worker:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Worker()

    def _give_back(self, worker: _Worker, is_sound: bool) -> None:
        with self._lock:
            if is_sound and not self._is_closed:
                self._idle.append(worker)
                return
        worker.kill()


def _name_of(function: Function) -> str:
    """Returns "module:function". Raises ValueError for a function inside another or a class, which
    a worker does not find."""
    if isinstance(function, str):
        return function
    if "." in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__} is no function at the top level of a module; move it there"
        )
    return f"{function.__module__}:{function.__qualname__}"


def _kill_all(workers: list[_Worker], owner: int) -> None:
    """Kills the workers, unless this is a process that was forked from their owner."""
    while workers and os.getpid() == owner:
        workers.pop().kill()


def _reported(fields: Mapping[str, Any]) -> _ReportedError:
    """Rebuilds the error that a function raised, as the same class of errors.py."""
    found = getattr(errors, str(fields["error"]), MediaError)
    kind = found if isinstance(found, type) and issubclass(found, RequestError) else MediaError
    return _ReportedError(kind(str(fields["message"])))


def _array(shape: Any, payload: bytearray) -> np.ndarray | None:
    if shape is None:
        return None
    if math.prod(shape) != len(payload):
        raise ValueError("an array's shape does not match its bytes")
    return np.frombuffer(payload, np.uint8).reshape(shape)
