"""Checks of a media processor among others: threads, other processors, and what is left when it is
closed."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice, product
from threading import Barrier
from typing import Any, TypeVar

from mmdeploy_llm.engine.intake.clashes import text_clash
from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor, PluginManager
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.testing.models.base import Check, CheckFailed, CheckSkipped, attributed, demand
from mmdeploy_llm.testing.plugins.left_over import Left

from .keys import difference
from .samples import unloaded
from .subject import ProcessorSubject

T = TypeVar("T")
NUM_THREADS = 8
NUM_ITEMS = 20  # of each thread, or those that it begins in these seconds
SECONDS = 0.1
SWITCH_SECONDS = 1e-5  # after which another thread runs, so that a race shows
# Instructions of a thread after which it may wait, at this rate, and so long.
NUM_WAITED, WAITING, WAITING_SECONDS = 2_000, 0.1, 1e-5
_TRACING = threading.Lock()  # Python refuses to install the traces of two threads at once


def threads_do_not_disturb_each_other(subject: ProcessorSubject) -> None:
    """The same items from eight threads at once yield the same bits as from one, also the first
    items of a new processor, and a loaded object that several share."""
    names = tuple(subject.sources())
    expected = {name: subject.made(name) for name in names}
    processor = subject.build()
    # What waits for other processes is no race of threads, and starting eight takes seconds.
    limits = replace(
        subject.limits,
        isolation="process" if subject.limits.isolation == "process" else "thread",
    )

    def work(number: int) -> list[tuple[str, MediaInput]]:
        found, end = [], time.monotonic() + SECONDS
        for name in islice(cycle(names), number, number + NUM_ITEMS):
            made = subject.run_source(name, subject.sources()[name], processor, limits=limits)
            found.append((name, made))
            if time.monotonic() >= end:
                return found
        return found

    package = package_of(processor)
    for found in at_once(work, package):
        for name, made in found:
            _demand_same(f"sample {name!r}", expected[name], made)
    for source, first in _shared_sources(subject):

        def shared(_: int, own: Any = source) -> MediaInput:
            return subject.run_source("it", own, processor)

        for made in at_once(shared, package):
            _demand_same("a loaded object that all threads share", first, made)


def _shared_sources(subject: ProcessorSubject) -> Iterator[tuple[Any, MediaInput]]:
    """Yields sources that nothing has read yet, with what they must become."""
    sources = unloaded(subject.spec.kind) if subject.has_generated_samples else []
    try:
        first = subject.run_source("it", sources.pop()) if sources else None
    except CheckFailed:
        return  # it does not read such objects
    for source in sources if first is not None else ():
        assert first is not None
        yield source, first


def _demand_same(what: str, expected: MediaInput, made: MediaInput) -> None:
    problem = difference(expected, made)
    demand(
        problem is None,
        f"{what}: with {NUM_THREADS} concurrent threads, {problem}; keep the state of an item in "
        "local variables, not in `self`, and guard what is shared with a lock",
    )


def package_of(plugin: object) -> str:
    """Returns the package, or the module, whose code a plugin's object is."""
    return type(plugin).__module__.partition(".")[0]


def at_once(work: Callable[[int], T], package: str) -> list[T]:
    """Returns what `work` returns in each of the threads, which begin together. package: whose code
    they leave to each other at any instruction."""
    barrier = Barrier(NUM_THREADS)

    def run(number: int) -> T:
        barrier.wait(60)
        with _interrupted(package, number):
            return work(number)

    with ThreadPoolExecutor(NUM_THREADS) as pool, _switching():
        return list(pool.map(run, range(NUM_THREADS)))


@contextmanager
def _interrupted(package: str, seed: int) -> Iterator[None]:
    """Has this thread wait, at random, between two instructions of the package, where nothing but a
    lock keeps others from what it was about to use."""
    rng, left = random.Random(seed), NUM_WAITED

    def traced(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if event == "call":
            if left <= 0 or frame.f_globals.get("__name__", "").partition(".")[0] != package:
                return None
            frame.f_trace_opcodes = True
        elif event == "opcode" and left > 0:
            left -= 1
            if rng.random() < WAITING:
                time.sleep(WAITING_SECONDS)
        frame.f_trace_opcodes = left > 0
        return traced

    before = sys.gettrace()
    with _TRACING:
        sys.settrace(traced)
    try:
        yield
    finally:
        with _TRACING:
            sys.settrace(before)


@contextmanager
def _switching() -> Iterator[None]:
    """Lets Python change between threads far more often than usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def closes_twice(subject: ProcessorSubject) -> None:
    """`close` may be called before any use, after use, and repeatedly."""
    unused, used = subject.build(), subject.build()
    subject.run(next(iter(subject.sources())), used)
    for processor, when in ((unused, "before any use"), (used, "after use")):
        for number in ("first", "second"):
            with attributed(f"the {number} close() {when}", "allow close() at any time"):
                processor.close()


def close_leaves_nothing(subject: ProcessorSubject) -> None:
    """`close` ends the threads and processes of the processor, and closes its files. Nothing else
    of this process has changed by then either."""
    names = list(subject.sources())[:2]
    for name in names:
        subject.made(name)  # what is imported at first use stays
    before = Left()
    processor = subject.build()
    for name in names:
        subject.run(name, processor)
    with attributed("close()", "allow close() at any time"):
        processor.close()
    problem = before.difference()
    demand(problem is None, f"after a processor was built, used and closed, {problem}")


def no_other_kind_has_the_token(subject: ProcessorSubject) -> None:
    """No placeholder of another kind that serves the same models is this one, begins or ends it."""
    mine, spec = subject.processor, subject.spec
    neighbours = [
        other
        for other in PluginManager.load().media_processors
        if other.kind != spec.kind and not other.yields and set(other.models) & set(spec.models)
    ]
    if not neighbours:
        raise CheckSkipped("no installed processor of another kind serves the same models")
    for other in neighbours:
        try:
            its: MediaProcessor = imported(other.factory)(subject.checkpoint, {})
        except (MMDeployLLMError, *FAULTS):
            continue  # it does not serve this checkpoint
        try:
            texts = dict.fromkeys((mine.token, *mine.markers)), (its.token, *its.markers)
            clashes = [text_clash(*pair) for pair in product(*texts)]
        finally:
            its.close()
        told = next((clash for clash in clashes if clash is not None), None)
        demand(
            told is None,
            f"{told}: the {spec.kind}s of this processor are not told from the {other.kind}s of "
            f"{other.name!r}, which serves the same models; give each kind a token and markers of "
            "its own",
        )


CHECKS: tuple[Check, ...] = (
    threads_do_not_disturb_each_other,
    closes_twice,
    close_leaves_nothing,
    no_other_kind_has_the_token,
)
