"""The threads of OpenMP that torch and the kernels compute with: one pool for each thread that
computes."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from mmdeploy_llm.system.portable.libraries import loaded

from .library import openmp_runtimes

PAUSE_HARD = 2  # omp_pause_hard


class ThreadCount:
    """The number of threads that torch computes with, changed for an engine's own work only.

    torch keeps one number for each thread and one for threads that are new; an engine's thread gets
    back what it had.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._local = threading.local()
        self._num_active = 0
        self._host = 0  # the program's number while an engine computes

    @contextmanager
    def computing(self, num_threads: int) -> Iterator[None]:
        """Computes with num_threads in the block, on the calling thread."""
        with self._lock:
            # A thread that is new to torch would read the number of another thread's engine.
            is_new = self._num_active > 0 and not hasattr(self._local, "is_known")
            before = self._host if is_new else torch.get_num_threads()
            self._host = self._host if self._num_active else before
            self._num_active += 1
            self._local.is_known = True
            if torch.get_num_threads() != num_threads:
                torch.set_num_threads(num_threads)
        try:
            yield
        finally:
            with self._lock:
                self._num_active -= 1
                if torch.get_num_threads() != before:
                    torch.set_num_threads(before)

    @property
    def of_host(self) -> int:
        """The number that the program computes with outside of engines."""
        with self._lock:
            is_new = self._num_active > 0 and not hasattr(self._local, "is_known")
            return self._host if is_new else torch.get_num_threads()


THREAD_COUNT = ThreadCount()  # one for the process, as torch's number is
_ENDED = threading.local()


def end_pool() -> None:
    """Ends the OpenMP threads that the calling thread has started; its next computation starts new
    ones. Does nothing where the runtime cannot (GNU's can since 9.1)."""
    pause = _pause()
    if pause is not None:
        pause(PAUSE_HARD)
        _ENDED.number = pool_number() + 1


def pool_number() -> int:
    """Returns how many pools of the calling thread have been ended: a new one has new threads."""
    return getattr(_ENDED, "number", 0)


@cache
def make_forks_safe() -> None:
    """Ends the forking thread's OpenMP threads before each fork. A forked process has none of them,
    and OpenMP would wait for them for ever in its first computation."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=end_pool)


@cache
def _pause() -> ctypes._NamedFuncPointer | None:
    """Returns omp_pause_resource_all of the runtime that torch has loaded."""
    for path in (*openmp_runtimes(), "libgomp.so.1"):
        library = loaded(path)
        if library is not None and hasattr(library, "omp_pause_resource_all"):
            return library.omp_pause_resource_all
    return None
