"""Workers: calls functions in worker processes."""

from __future__ import annotations

import contextlib
import math
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mmdeploy_llm import errors
from mmdeploy_llm.errors import MediaError, MediaTimeoutError, RequestError
from mmdeploy_llm.hooks import MediaLimits

from .wire import PeerGoneError, receive, send

START_TIMEOUT = 60.0  # seconds for a first answer, the start of the process included
MAX_REPLY = 2**31  # bytes of one array
BOUNDS = ("max_bytes", "max_pixels", "max_frames", "max_duration")  # what a codec must keep to

Answer = tuple[Mapping[str, Any], "np.ndarray | None"]


class _ToldError(Exception):
    """A function raised `error` in its worker, which is none the worse for it."""

    def __init__(self, error: RequestError) -> None:
        super().__init__()
        self.error = error


class _Worker:
    """One process and the socket to it. Used by one thread at a time."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self.peer = ours
        self.is_fresh = True

    def kill(self) -> int:
        """Ends it at once; its exit status."""
        self.peer.close()
        self._process.kill()
        return self._process.wait()

    def ended_by(self) -> str:
        """In words, once it is gone."""
        try:
            status = self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            status = self.kill()
        if status < 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(-status).name}"
        return f"exit status {status}"


class Workers:
    """Idle worker processes, started when they are needed. Safe for use from several threads.

    As many run at once as there are threads that call `stream`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._is_closed = False
        # Also without `close` no process outlives the object.
        self._finalizer = weakref.finalize(self, _kill_all, self._idle)

    def stream(
        self,
        function: str,
        blob: bytes,
        args: Mapping[str, Any],
        *,
        timeout: float,
        max_memory: int,
    ) -> Iterator[Answer]:
        """What the generator "module:function"(blob, **args) yields, in a worker.

        args, and the first of each pair it yields, are JSON; the second is a uint8 array or None.
        timeout: seconds of waiting for the worker, in all. max_memory: bytes. Raises the
        RequestError that the function raised, MediaTimeoutError when time is up, MediaError when
        the process dies.
        """
        worker = self._take()
        is_sound = False
        try:
            yield from self._answers(
                worker,
                {"function": function, "args": dict(args), "max_memory": max_memory},
                blob,
                timeout,
            )
            is_sound = True
        except _ToldError as told:
            is_sound = True
            raise told.error from None
        finally:
            self._give_back(worker, is_sound)

    def decode(
        self, function: str, blob: bytes, limits: MediaLimits, **args: Any
    ) -> Iterator[Answer]:
        """As `stream`, within the limits of one item, whose bounds the function gets as `limits`:
        a dict for MediaLimits(**limits)."""
        bounds = {name: getattr(limits, name) for name in BOUNDS}
        return self.stream(
            function,
            blob,
            {"limits": bounds, **args},
            timeout=limits.decode_timeout,
            max_memory=limits.decode_memory,
        )

    def max_seconds(self, limits: MediaLimits) -> float:
        """What a processor's call that calls `decode` once or twice may take: the start of a
        process, and as much time for what it does itself as for the process."""
        return START_TIMEOUT + 2 * limits.decode_timeout

    def close(self) -> None:
        """Ends all idle workers; those at work end with their call."""
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
                begin = time.monotonic()
                worker.peer.settimeout(max(left, 0.001))
                facts, payload = receive(worker.peer, MAX_REPLY)
                left -= time.monotonic() - begin
                if worker.is_fresh:
                    worker.is_fresh, left = False, min(left, timeout)
                if left <= 0:
                    raise TimeoutError
                if "error" in facts:
                    raise _told(facts)
                if "done" in facts:
                    return
                yield facts["facts"], _array(facts["shape"], payload)
        except TimeoutError:
            raise MediaTimeoutError(
                f"decoding took longer than the {timeout:g} seconds that are allowed; raise "
                "media_timeout or give something simpler"
            ) from None
        except PeerGoneError:
            raise MediaError(
                f"the process that decoded it died ({worker.ended_by()}); it is probably corrupt"
            ) from None
        except ValueError:
            raise MediaError("the process that decoded it answered nonsense") from None

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


def _kill_all(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().kill()


def _told(facts: Mapping[str, Any]) -> _ToldError:
    """The error a function raised, as the same class of errors.py."""
    found = getattr(errors, str(facts["error"]), MediaError)
    kind = found if isinstance(found, type) and issubclass(found, RequestError) else MediaError
    return _ToldError(kind(str(facts["message"])))


def _array(shape: Any, payload: bytearray) -> np.ndarray | None:
    if shape is None:
        return None
    if math.prod(shape) != len(payload):
        raise ValueError("an array's shape and bytes do not fit")
    return np.frombuffer(payload, np.uint8).reshape(shape)
