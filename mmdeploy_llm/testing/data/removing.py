"""Removes records of a store in processes that are killed at each step, and reports what is left.
It runs in a process of its own, which forks these."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mmdeploy_llm.data.outputs.opening.stored import StoreSink
from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS

# Builtin functions and methods by which a store changes files.
CHANGING = frozenset(
    {"__exit__", "close", "commit", "execute", "executemany", "executescript", "flush", "fsync",
     "ftruncate", "link", "mkdir", "print", "remove", "rename", "replace", "rmdir", "symlink",
     "sync", "truncate", "unlink", "write", "writelines"}
)  # fmt: skip
SECONDS = 5.0  # until which a forked process must have ended
MOST_STEPS = 6  # at the beginning of a removal, and at its end; fewer between
# Of the seconds of the longest steps, which may be many inside of one call.
LONG = (0.02, 0.05, 0.1, 0.2, 0.4, 0.7)
SHORTEST = 1e-4  # seconds after which a step is ended, at least
NUM_LONG = 2

Told = dict[str, Any]
Again = Callable[[Path], StoreSink]


@dataclass
class Steps:
    """Counts the steps of a removal. die_at: the number of the one before which this process is
    killed. die_after: seconds of that step, after which it is. found: the names of the steps, with
    the seconds of each."""

    die_at: int = -1
    die_after: float = 0.0
    found: list[tuple[str, float]] = field(default_factory=list)
    _begun: float = 0.0

    def __call__(self, frame: Any, event: str, called: Any) -> None:
        """Is told of each call, as sys.setprofile says."""
        if event not in ("c_call", "c_return", "c_exception"):
            return
        name = getattr(called, "__name__", "")
        if name not in CHANGING:
            return
        if event != "c_call":
            self.found[-1] = name, time.perf_counter() - self._begun
            return
        if len(self.found) == self.die_at:
            if not self.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            signal.setitimer(signal.ITIMER_REAL, self.die_after)  # its signal ends the process
        self.found.append((name, 0.0))
        self._begun = time.perf_counter()


def report(sink: StoreSink, again: Again, positions: Sequence[int]) -> Told:
    """Returns the first fault of removals that were killed: `when` it was, how many removed records
    are `there`, the ids of others that are `lost`, and the `error` of reading; {} without a fault,
    and why nothing can be tried as `skipped`."""
    path = Path(sink.path)
    copy = path.with_name(f"copy{path.suffix}")
    gone = [entry.record.id for entry in sink.entries() if entry.begin in positions]
    every, _ = _ids(_copied(path, copy), again)  # imports what later processes need
    found = _in_fork(lambda: _remove(_copied(path, copy), again, positions, Steps()))
    if not isinstance(found, list):
        return {"skipped": f"`delete` did not end where a process was forked: {found}"}
    for die_at, die_after in _points([(name, seconds) for name, seconds in found]):
        steps = Steps(die_at=die_at, die_after=die_after)
        while True:
            _copied(path, copy)
            ended = _in_fork(partial(_remove, copy, again, positions, steps))
            if ended is None or steps.die_after < SHORTEST:
                break
            steps.die_after /= 2  # the step took less time than when it was measured
        told = _in_fork(lambda: _ids(copy, again))
        left, error = told if isinstance(told, list) else ([], told or "reading does not end")
        there = sum(own in left for own in gone)
        lost = [own for own in every if own not in left and own not in gone]
        if error or lost or there not in (0, len(gone)):
            when = f"{'in' if die_after else 'before'} its step {die_at + 1}, {found[die_at][0]}"
            return {"when": when, "there": there, "lost": lost, "error": error}
    return {}


def _points(steps: list[tuple[str, float]]) -> Iterator[tuple[int, float]]:
    """Yields the numbers of the steps, each with the seconds after which it is ended."""
    last = len(steps)
    between = range(MOST_STEPS, last - MOST_STEPS, max(1, last // MOST_STEPS * 2))
    for number in sorted({*range(min(last, MOST_STEPS)), *between, *range(last)[-MOST_STEPS:]}):
        yield number, 0.0
    for number in sorted(range(last), key=lambda it: -steps[it][1])[:NUM_LONG]:
        for share in LONG:
            yield number, max(1e-6, steps[number][1] * share)


def _remove(path: Path, again: Again, positions: Sequence[int], steps: Steps) -> Any:
    """Removes the records; returns the steps."""
    store = again(path).open(is_written=True)
    sys.setprofile(steps)
    try:
        store.delete(list(positions))
    finally:
        sys.setprofile(None)
    store.close()
    return steps.found


def _ids(path: Path, again: Again) -> tuple[list[Any], str]:
    """Returns the ids of the records, read before and after the next run opens the output; with an
    error where both differ."""
    sink = again(path)
    before = [entry.record.id for entry in sink.entries()]
    sink.open(is_written=True).close()
    after = [entry.record.id for entry in sink.entries()]
    return after, "" if after == before else "the next run changes what is there"


def _copied(path: Path, copy: Path) -> Path:
    """Puts a copy of an output in the place of the last one, with the files that stand beside."""
    for own in path.parent.iterdir():
        if own.name.startswith(copy.stem):
            shutil.rmtree(own) if own.is_dir() else own.unlink()
    for own in list(path.parent.iterdir()):
        other = own.with_name(own.name.replace(path.stem, copy.stem, 1))
        if own.name.startswith(path.stem):
            shutil.copytree(own, other) if own.is_dir() else shutil.copyfile(own, other)
    return copy


def _in_fork(work: Callable[[], Any]) -> Any:
    """Returns what `work` returns in a process of its own, as JSON holds it, a text that names the
    error that it raises, or None where the process is killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        try:
            found = work()
        except FAULTS as error:
            found = f"it raised {error_text(error)}"
        with os.fdopen(writing, "w", encoding="utf-8") as file:
            json.dump(found, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None
