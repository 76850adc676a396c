"""Calls a function of a plugin with a bound in time."""

from __future__ import annotations

import threading
from collections.abc import Callable
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
