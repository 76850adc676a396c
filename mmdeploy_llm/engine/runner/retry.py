"""Retry: computes a step in one forward pass, and in smaller ones after a pass failed, so that only
the requests at fault fail.

    out of memory  [a a a | b b b b] -> [a a a] [b b b b] -> .. [b b] [b b]   in later steps too
    other errors   [a a a | b b b b] -> [a a a] [b b b b]                     in this step only

A failed pass costs no request its cache: the blocks of the whole step are allocated before it, so
that nothing is preempted or computed twice. A pass that cannot be split any further fails its
request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from mmdeploy_llm.hooks.names import error_text
from mmdeploy_llm.hooks.records import FAULTS
from mmdeploy_llm.layers.attention.out_of_memory import is_out_of_memory, release_cached_memory
from mmdeploy_llm.system.sharding.peers import Peers
from mmdeploy_llm.values.plan import RequestFailure, ScheduledTokens

from .outcome import StepOutcome, failure_of

logger = logging.getLogger(__name__)

GOOD_PASSES = 100  # steps without running out of memory, after which max_tokens doubles

Pass = Sequence[ScheduledTokens]
CanSplit = Callable[[ScheduledTokens], bool]  # see Passes.can_split


class Passes(Protocol):
    """Computes forward passes: the runner. Retry is given it with each call and does not keep it,
    since two objects that hold each other would keep the model in memory after `close`."""

    def compute(self, items: Pass) -> StepOutcome:
        """Runs one forward pass and samples; may raise."""

    def reset(self, item: ScheduledTokens) -> None:
        """Sets the sampling state of an item back to the tokens that the host knows."""

    def can_split(self, item: ScheduledTokens) -> bool:
        """Whether the tokens of an item may be computed in several passes."""


class Retry:
    """Computes a step that was not launched, in one pass or several. The runner is its only
    user."""

    def __init__(self, *, device: torch.device, peers: Peers) -> None:
        self._size = PassSize()
        self._device, self._peers = device, peers

    @property
    def is_one_pass(self) -> bool:
        """Whether a step is computed in one pass: memory has not run out lately."""
        return self._size.max_tokens is None

    def run(self, passes: Passes, step: Pass, outcome: StepOutcome, *, has_raised: bool) -> None:
        """Computes the step into `outcome`. has_raised: one pass over the whole step was attempted
        before, and raised."""
        for items in self._size.passes(step, passes.can_split):
            self._run_pass(passes, items, outcome, has_raised)

    def _run_pass(self, passes: Passes, items: Pass, outcome: StepOutcome, is_retry: bool) -> None:
        if outcome.errors:  # an earlier chunk of the same request may have failed
            items = [item for item in items if item.request_id not in outcome.errors]
        error = self._error_of(passes, items, outcome, is_retry) if items else None
        if error is None:
            return
        # Runs outside the except block, whose exception kept the failed pass's tensors alive.
        smaller: Sequence[Pass] = ()
        if is_out_of_memory(error):
            release_cached_memory(self._device)
            smaller = self._size.split(items, passes.can_split)
        elif len(items) > 1:
            logger.warning("a forward pass failed; its requests are retried one by one")
            smaller = [[item] for item in items]
        for fewer in smaller:
            self._run_pass(passes, fewer, outcome, is_retry=True)
        if not smaller:
            failure = self._failure(error)
            outcome.errors.update(dict.fromkeys((item.request_id for item in items), failure))

    def _error_of(
        self, passes: Passes, scheduled: Pass, outcome: StepOutcome, is_retry: bool
    ) -> BaseException | None:
        """Runs one pass. Merges its results into `outcome`, or returns the exception with its
        traceback dropped, so that its tensors are freed."""
        try:
            if is_retry:  # the failed pass may have drawn tokens on the device already
                for item in scheduled:
                    if item.samples:
                        passes.reset(item)
            done = passes.compute(scheduled)
        except FAULTS as error:
            self._peers.raised(error)
            if not is_out_of_memory(error):
                logger.warning("a forward pass failed", exc_info=True)
            return error.with_traceback(None)
        outcome.merge(done)
        return None

    def _failure(self, error: BaseException) -> RequestFailure:
        """Returns the failure of the only request of a pass that cannot be split."""
        if not is_out_of_memory(error):
            return failure_of("the model failed on this request", error)
        reason = error_text(error).partition(". ")[0].partition("\n")[0]
        message = (
            f"{self._device} has not enough memory even for this request alone ({reason}); shorten "
            "it, or lower gpu_memory_utilization or kv_cache_memory"
        )
        return RequestFailure(code=500, message=message)


class PassSize:
    """How many tokens a forward pass may have: a whole step until memory runs out. Retry is its
    only writer."""

    def __init__(self) -> None:
        self._max_tokens: int | None = None
        self._num_good = 0

    @property
    def max_tokens(self) -> int | None:
        """The upper bound of tokens in one pass; None: no bound."""
        return self._max_tokens

    def passes(self, scheduled: Pass, can_split: CanSplit) -> Sequence[Pass]:
        """Returns the passes of a step, in order; each request is at most once in a pass."""
        if self._max_tokens is None:
            return (scheduled,)
        self._num_good += 1
        if self._num_good > GOOD_PASSES:
            self._num_good, self._max_tokens = 0, 2 * self._max_tokens
        return tuple(_split(scheduled, self._max_tokens, can_split))

    def split(self, failed: Pass, can_split: CanSplit) -> Sequence[Pass]:
        """Returns the passes that replace one that ran out of memory, and bounds later passes to
        their size; () when it cannot be split."""
        num_tokens = sum(item.num_tokens for item in failed)
        max_tokens = (num_tokens + 1) // 2
        passes = tuple(_split(failed, max_tokens, can_split))
        if len(passes) < 2:
            return ()
        self._max_tokens = min(max_tokens, self._max_tokens or max_tokens)
        self._num_good = 0
        logger.warning(
            "a forward pass of %d tokens ran out of memory; passes have at most %d tokens now",
            num_tokens,
            self._max_tokens,
        )
        return passes


def _split(scheduled: Pass, max_tokens: int, can_split: CanSplit) -> Iterator[Pass]:
    """Yields passes of at most `max_tokens` tokens, or of one item that cannot be split."""
    current: list[ScheduledTokens] = []
    num_free = max_tokens
    for item in scheduled:
        if current and item.num_tokens > num_free and not can_split(item):
            yield current
            current, num_free = [], max_tokens
        while item.num_tokens > num_free and can_split(item):
            if num_free:
                first, item = _split_item(item, num_free)
                current.append(first)
            yield current
            current, num_free = [], max_tokens
        current.append(item)
        num_free -= item.num_tokens
        if num_free <= 0:
            yield current
            current, num_free = [], max_tokens
    if current:
        yield current


def _split_item(item: ScheduledTokens, num_first: int) -> tuple[ScheduledTokens, ScheduledTokens]:
    first = replace(item, num_tokens=num_first, samples=False)
    num_rest = item.num_tokens - num_first
    rest = replace(item, start=item.start + num_first, num_tokens=num_rest, new_block_ids=())
    return first, rest
