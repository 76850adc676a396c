"""Has OpenMP's threads sleep instead of spin while other threads want their CPUs.

After each product the threads of GNU's runtime spin for milliseconds until all are there. That is
fastest where each has a CPU of its own; where it has not, it spins in the time that the thread it
waits for needs, and a run takes several times as long. The runtime spins for microseconds only
while it knows of more threads than CPUs: then some more are made, which do nothing.

Threads that sleep wait for a CPU too, whenever they are woken, on virtual machines for a fifth of
the time that they run and more. So what is seen then does not tell whether the others have gone:
after a while threads spin again, and if they have to wait, they sleep for twice as long.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from mmdeploy_llm.system.portable.libraries import c_library, loaded

from .library import openmp_runtimes
from .openmp import end_pool

logger = logging.getLogger(__name__)

TASKS = Path("/proc/self/task")
INTERVAL = 0.5  # seconds between two looks
CROWDED = 0.2  # seconds that threads wait for a CPU, of each second that they have one
FIRST, MOST = 10, 120  # looks for which a crowd is believed to be there
AGAIN = 4  # looks within which it is the same one
LEAST = 0.05  # CPU seconds in an interval that say something


class Crowd:
    """Whether the threads of this process wait for CPUs that others have. Writer: its thread."""

    def __init__(self, times: tuple[float, float]) -> None:
        """times: as of `see`, until now."""
        self.is_there = False
        self._num_believed = FIRST  # looks, of the last crowd
        self._num_looks = AGAIN  # since it came or went
        self._before = times

    def see(self, times: tuple[float, float]) -> None:
        """Takes the seconds that threads have had a CPU, and waited for one, until now."""
        pairs = zip(times, self._before, strict=True)
        ran, waited = (max(0.0, now - before) for now, before in pairs)  # threads may have ended
        self._before = times
        if ran < LEAST:
            return
        self._num_looks += 1
        if self.is_there:
            if self._num_looks >= self._num_believed:
                self.is_there, self._num_looks = False, 0
        elif waited > CROWDED * ran:
            is_same = self._num_looks <= AGAIN
            self._num_believed = min(2 * self._num_believed, MOST) if is_same else FIRST
            self.is_there, self._num_looks = True, 0


def watch_crowd() -> Callable[[], None]:
    """Starts a thread that watches for a crowd, and acts; returns what ends it. Does nothing where
    the system does not tell, or OpenMP is not GNU's."""
    runtime = _runtime()
    if runtime is None or not sum(thread_times()):
        return lambda: None
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(runtime, stop), name="crowd", daemon=True)
    thread.start()

    def end() -> None:
        stop.set()
        if thread is not threading.current_thread():
            thread.join(INTERVAL)

    return end


def _watch(runtime: ctypes.CDLL, stop: threading.Event) -> None:
    crowd = Crowd(thread_times())  # what was before, such as a load, says nothing
    while not stop.wait(INTERVAL):
        was_there = crowd.is_there
        crowd.see(thread_times())
        if crowd.is_there and not was_there:
            logger.info("other threads want the CPUs: threads that compute wait without spinning")
            add_idle_threads(runtime)
        elif was_there and not crowd.is_there:
            end_pool()


def thread_times() -> tuple[float, float]:
    """Returns the seconds that the threads of this process have had a CPU, and waited for one;
    zeros where the system does not tell."""
    ran = waited = 0
    with suppress(OSError):
        for path in TASKS.iterdir():
            with suppress(OSError, ValueError):  # it has ended
                on_cpu, in_queue, _ = map(int, (path / "schedstat").read_bytes().split())
                ran, waited = ran + on_cpu, waited + in_queue
    return ran / 1e9, waited / 1e9


def add_idle_threads(runtime: ctypes.CDLL) -> None:
    """Starts as many threads of OpenMP as there are CPUs, which end with the calling thread or with
    `end_pool` there."""
    library = c_library()
    assert library is not None
    nothing = ctypes.cast(library.getppid, ctypes.c_void_p)  # what each of them calls
    runtime.GOMP_parallel(nothing, None, runtime.omp_get_num_procs() + 1, 0)


def _runtime() -> ctypes.CDLL | None:
    """Returns GNU's OpenMP if it is loaded."""
    for path in (*openmp_runtimes(), "libgomp.so.1"):
        library = loaded(path)
        if library is not None and hasattr(library, "GOMP_parallel") and c_library() is not None:
            return library
    return None
