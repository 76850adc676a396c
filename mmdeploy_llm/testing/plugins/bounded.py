"""Calls a function of a plugin with a bound in time, and measures the memory that it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from mmdeploy_llm.testing.models.base import CheckFailed

T = TypeVar("T")


def bounded(function: Callable[[], T], seconds: float, what: str, advice: str) -> T:
    """Returns the result, or raises what the function raises. Raises CheckFailed when it takes
    longer; the thread in which it runs is then left alone."""
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True, name="bounded check")
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise CheckFailed(f"{what} has not ended after {seconds:g} s; {advice}")
    if raised:
        raise raised[0]
    return found[0]


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class Peak:
    """The largest memory of this process since this was made. Only Linux tells it; elsewhere 0."""

    def __init__(self) -> None:
        try:
            CLEAR.write_text("5", encoding="ascii")  # the peak begins anew
        except OSError:
            self._before = None
        else:
            self._before = _read("VmRSS")

    def taken(self) -> int:
        """Returns the bytes that came on top of those at the beginning."""
        peak = _read("VmHWM")
        if self._before is None or peak is None:
            return 0
        return max(0, peak - self._before)


def _read(name: str) -> int | None:
    """Returns a size of this process in bytes."""
    try:
        lines = STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith(f"{name}:")), None)
    return None if found is None else int(found[1]) * 1024
