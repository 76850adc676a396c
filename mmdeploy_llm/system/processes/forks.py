"""Keeps a forked child away from what belongs to its parent.

A fork copies this process's memory and its open files, but only the thread that forks. In the child
the engine's threads do not exist, its locks may be held for ever, and its connections lead to
processes that work for the parent. So objects remember the process that made them: their methods
refuse to run in another one, and their finalizers do nothing there.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import sys
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
) -> Callable[[], None]:
    """Calls the function once, when the returned object is called, the owner is collected or, with
    at_exit, the program ends (the newest first), whatever comes first; never in a process that was
    forked meanwhile.

    It is used instead of weakref.finalize, which reads its table as the interpreter ends and stops
    at an entry that comes or goes in another thread meanwhile (CPython 3.11 to 3.14): then the
    children of the program are not ended."""
    home = Home()
    table = _AT_EXIT if at_exit else _COLLECTED
    number = next(_NUMBERS)

    def run() -> None:
        if home.is_here:
            function(*args, **kwargs)

    def finalize(_: object = None) -> None:
        if table.pop(number, None) is not None:
            run()

    table[number] = weakref.ref(owner, finalize), run
    _register()
    return finalize


# What is still to be run, and the reference to its owner that runs it when that is collected.
_Table = dict[int, tuple[weakref.ref[Any], Callable[[], None]]]
_AT_EXIT: _Table = {}
_COLLECTED: _Table = {}
_NUMBERS = itertools.count()


@functools.cache
def _register() -> None:
    """Has the end of the program run the finalizers. The first of them asks for it, when the
    libraries that it needs are there, because what was registered last runs first."""
    atexit.register(_finalize_all)


def _finalize_all() -> None:
    _COLLECTED.clear()
    while _AT_EXIT:
        try:
            _, (_, run) = _AT_EXIT.popitem()  # one step, whatever other threads do
        except KeyError:  # another thread took the last one
            return
        try:
            run()
        except Exception:
            sys.excepthook(*sys.exc_info())
