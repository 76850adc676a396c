"""Checks of a media processor among others: threads, other processors, and what is left when it is
closed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from itertools import cycle, islice
from threading import Barrier

from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor, PluginManager
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.model_checks.base import Check, CheckSkipped, attributed, demand
from mmdeploy_llm.plugin_checks.left_over import Left

from .keys import difference
from .subject import ProcessorSubject

NUM_THREADS = 8
NUM_ITEMS = 20  # of each thread, or those that it begins in these seconds
SECONDS = 0.1
SWITCH_SECONDS = 1e-5  # after which another thread runs, so that a race shows


def threads_do_not_disturb_each_other(subject: ProcessorSubject) -> None:
    """The same items from eight threads at once yield the same bits as from one, also the first
    items of a new processor."""
    names = tuple(subject.sources())
    expected = {name: subject.made(name) for name in names}
    processor, is_slow = _new_or_shared(subject, names[0])
    barrier = Barrier(NUM_THREADS)

    def work(number: int) -> list[tuple[str, MediaInput]]:
        barrier.wait(60)
        found, end = [], time.monotonic() + SECONDS
        for name in islice(cycle(names), number, number + NUM_ITEMS):
            found.append((name, subject.run(name, processor)))
            if time.monotonic() >= end:
                return found
        return found

    # What waits for other processes needs no changes between threads, and suffers from them.
    often = nullcontext() if is_slow else _switching()
    with ThreadPoolExecutor(NUM_THREADS) as pool, often:
        for found in pool.map(work, range(NUM_THREADS)):
            for name, made in found:
                problem = difference(expected[name], made)
                demand(
                    problem is None,
                    f"sample {name!r}: with {NUM_THREADS} concurrent threads, {problem}; keep the "
                    "state of an item in local variables, not in `self`, and guard what is shared "
                    "with a lock",
                )


def _new_or_shared(subject: ProcessorSubject, name: str) -> tuple[MediaProcessor, bool]:
    """Returns a processor that nothing has used yet, or the common one where beginning is slow, and
    whether it is."""
    start = time.monotonic()
    subject.run(name, subject.build())
    is_slow = time.monotonic() - start > SECONDS  # it starts processes
    return (subject.processor if is_slow else subject.build()), is_slow


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
    """No processor of another kind that serves the same models has the same placeholder."""
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
            theirs = {getattr(its, "token", None), *its.markers}  # a splitter has no token
            shared = ({mine.token, *mine.markers} & theirs) - {None}
        finally:
            its.close()
        demand(
            not shared,
            f"{', '.join(map(repr, sorted(shared)))} stands for the {spec.kind}s of this processor "
            f"and for the {other.kind}s of {other.name!r}, which serves the same models; give each "
            "kind a token and markers of its own",
        )


CHECKS: tuple[Check, ...] = (
    threads_do_not_disturb_each_other,
    closes_twice,
    close_leaves_nothing,
    no_other_kind_has_the_token,
)
