"""Checks of a media processor among others: threads, other processors, and what is left when it is
closed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

from mmdeploy_llm.errors import MMDeployLLMError
from mmdeploy_llm.hooks import MediaInput, MediaProcessor, PluginManager
from mmdeploy_llm.hooks.factories import imported
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.hooks.selection import ANY_MODEL
from mmdeploy_llm.model_checks.base import Check, CheckSkipped, attributed, demand

from .left_over import Left
from .processor_keys import difference
from .processor_subject import ProcessorSubject

NUM_THREADS = 8
SWITCH_SECONDS = 1e-5  # after which another thread runs, so that a race shows


def threads_do_not_disturb_each_other(subject: ProcessorSubject) -> None:
    """The same items from eight threads at once yield the same bits as from one, also the first
    items of a new processor."""
    names = tuple(subject.sources())
    processor = subject.build(subject.options)
    expected = {name: subject.made(name) for name in names}
    barrier = Barrier(NUM_THREADS)

    def work(number: int) -> list[tuple[str, MediaInput]]:
        barrier.wait(60)
        order = names[number % len(names) :] + names[: number % len(names)]
        return [(name, subject.run(name, processor)) for name in order]

    with ThreadPoolExecutor(NUM_THREADS) as pool, _switching():
        for found in pool.map(work, range(NUM_THREADS)):
            for name, made in found:
                problem = difference(expected[name], made)
                demand(
                    problem is None,
                    f"sample {name!r}: with {NUM_THREADS} concurrent threads, {problem}; keep the "
                    "state of an item in local variables, not in `self`, and guard what is shared "
                    "with a lock",
                )


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
        if other.kind != spec.kind and _share_a_model(other.models, spec.models)
    ]
    if not neighbours:
        raise CheckSkipped("no installed processor of another kind serves the same models")
    for other in neighbours:
        try:
            its: MediaProcessor = imported(other.factory)(subject.checkpoint, {})
        except (MMDeployLLMError, *FAULTS):
            continue  # it does not serve this checkpoint
        try:
            shared = {mine.token, *mine.markers} & {its.token, *its.markers}
        finally:
            its.close()
        demand(
            not shared,
            f"{', '.join(map(repr, sorted(shared)))} stands for the {spec.kind}s of this processor "
            f"and for the {other.kind}s of {other.name!r}, which serves the same models; give each "
            "kind a token and markers of its own",
        )


def _share_a_model(one: Any, other: Any) -> bool:
    return bool(set(one) & set(other) or ANY_MODEL in one or ANY_MODEL in other)


CHECKS: tuple[Check, ...] = (
    threads_do_not_disturb_each_other,
    closes_twice,
    close_leaves_nothing,
    no_other_kind_has_the_token,
)
