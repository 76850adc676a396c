"""Keeps a forked child away from what belongs to its parent.

A fork copies this process's memory and its open files, but only the thread that forks. In the child
the engine's threads do not exist, its locks may be held for ever, and its connections lead to
processes that work for the parent. So objects remember the process that made them: their methods
refuse to run in another one, and their finalizers do nothing there.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from mmdeploy_llm.errors import EngineError

FORKED = (
    "this LLM belongs to process {parent}, and this is process {child}, which was forked from it: "
    "its engine does not exist here. Create the LLM in the child, or create it after the processes "
    "are started; with the spawn start method (multiprocessing.get_context('spawn'), the option "
    "multiprocessing_context of a DataLoader) nothing of the parent is copied"
)


class Home:
    """The process in which an object was made."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this process is the one that made the object, not one forked from it."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises EngineError in a forked process."""
        if not self.is_here:
            raise EngineError(FORKED.format(parent=self._pid, child=os.getpid()))


def finalize_here(
    owner: object,
    function: Callable[..., object],
    *args: Any,
    at_exit: bool = True,
    **kwargs: Any,
) -> Callable[[], object]:
    """Calls the function once, when the returned object is called, the owner is collected or, with
    at_exit, the program ends, whatever comes first; never in a process that was forked
    meanwhile."""
    found = weakref.finalize(owner, _call_at, Home(), function, args, kwargs)
    found.atexit = at_exit
    return found


def _call_at(
    home: Home, function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if home.is_here:
        function(*args, **kwargs)
