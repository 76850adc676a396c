"""The pool of worker processes: calls a function in one and streams its results back."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import numpy as np

from mmdeploy_llm import errors
from mmdeploy_llm.errors import (
    EngineError,
    MediaError,
    MediaTimeoutError,
    RequestError,
    WorkerDiedError,
)
from mmdeploy_llm.hooks import MediaLimits
from mmdeploy_llm.hooks.files import file_of
from mmdeploy_llm.system.processes.frames import Frame
from mmdeploy_llm.system.processes.helper import START_SECONDS, Helper
from mmdeploy_llm.system.processes.wire import beside_pickle

from .worker import serve

MAX_ARRAY = 2**31  # bytes
BOUNDS = ("max_bytes", "max_pixels", "max_frames", "max_duration", "pixels")  # what codecs keep to

Answer = tuple[Mapping[str, Any], "np.ndarray | None"]
# A function at the top level of a module or of a plugin's single file, or "module:function".
Function = str | Callable[..., Iterable[Any]]


class Workers:
    """A pool of worker processes, started on demand. Safe for use from several threads.

    At most one process runs for each thread that calls `stream`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[Helper] = []  # their processes end with them, even without `close`
        self._is_closed = False

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
        call = {
            "function": name,
            "file": None if file is None else str(file),
            "args": dict(args),
            "max_memory": max_memory,
        }
        helper = self._take()
        try:
            with closing(helper.stream((call, beside_pickle(blob)), timeout)) as frames:
                for frame in frames:
                    yield _answer_of(frame)
                    if frame.seconds_left <= 0:  # what came in time was given
                        raise TimeoutError
        except TimeoutError:
            raise MediaTimeoutError(
                f"decoding took longer than the {timeout:g} seconds that are allowed; raise "
                "media_timeout or give a simpler file"
            ) from None
        except WorkerDiedError as died:
            raise MediaError(f"{died}; it is probably corrupt") from None
        except EngineError as error:
            raise MediaError(str(error)) from None
        finally:
            self._give_back(helper)

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
        return START_SECONDS + 2 * limits.decode_timeout

    def close(self) -> None:
        """Ends all idle workers; busy ones end with their call."""
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._idle.pop().close()

    def _take(self) -> Helper:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return Helper("the process that decoded it", serve, None, MAX_ARRAY)

    def _give_back(self, helper: Helper) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(helper)
                return
        helper.close()


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


def _answer_of(frame: Frame) -> Answer:
    """Returns a pair that the function yielded. Raises the error that it raised, as the same class
    of errors.py, and MediaError for what is no answer."""
    try:
        if frame.text:
            fields = json.loads(frame.text)
            return fields["fields"], _array(fields["shape"], frame)
        name, message = map(str, json.loads(bytes(frame.buffers[0])))
    except (ValueError, LookupError, TypeError, RecursionError):
        raise MediaError("the process that decoded it sent an invalid answer") from None
    found = getattr(errors, name, MediaError)
    kind = found if isinstance(found, type) and issubclass(found, RequestError) else MediaError
    raise kind(message)


def _array(shape: Any, frame: Frame) -> np.ndarray | None:
    return None if shape is None else np.frombuffer(frame.buffers[0], np.uint8).reshape(shape)
