"""What follows when a forward pass finds no memory: the step goes on in smaller passes.

    one pass [a a a | b b b b]  --no memory-->  [a a a] [b b b b]  --no memory-->  ... [b b] [b b]

Nothing of a request is lost with a pass: its blocks are there since the start, so it needs neither
preemption nor recompute. Only a pass that cannot be cut any further fails its one request.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from mmdeploy_llm.plan import ScheduledTokens

logger = logging.getLogger(__name__)

# RuntimeErrors of torch that mean it too: of the CPU, of the driver, of cuBLAS.
SIGNS = ("DefaultCPUAllocator", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
GOOD_PASSES = 100  # so many without trouble, and passes may be twice as large again

Pass = Sequence[ScheduledTokens]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory is out, on whichever device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


def give_back_memory(device: torch.device) -> None:
    """What the allocator keeps for later goes back to the card, so that gaps can be joined."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class PassSize:
    """How many tokens a forward pass may have: all of a step until one found no memory. The runner
    is its only writer."""

    def __init__(self, can_cut: Callable[[ScheduledTokens], bool]) -> None:
        """can_cut: whether the tokens of an item may be computed in several passes."""
        self._can_cut = can_cut
        self._most: int | None = None
        self._num_good = 0

    @property
    def most_tokens(self) -> int | None:
        """Of one pass; None: any number."""
        return self._most

    def passes(self, scheduled: Pass) -> Sequence[Pass]:
        """The passes that the step takes, in order; each request once in a pass at most."""
        if self._most is None:
            return (scheduled,)
        self._num_good += 1
        if self._num_good > GOOD_PASSES:
            self._num_good, self._most = 0, 2 * self._most
        return tuple(_cut(scheduled, self._most, self._can_cut))

    def smaller(self, failed: Pass) -> Sequence[Pass]:
        """The passes to try in place of one that found no memory; () when it cannot be cut."""
        num_tokens = sum(item.num_tokens for item in failed)
        most = (num_tokens + 1) // 2
        passes = tuple(_cut(failed, most, self._can_cut))
        if len(passes) < 2:
            return ()
        self._most, self._num_good = min(most, self._most or most), 0
        logger.warning(
            "no memory for a pass of %d tokens; passes have %d now", num_tokens, self._most
        )
        return passes


def _cut(scheduled: Pass, most: int, can_cut: Callable[[ScheduledTokens], bool]) -> Iterator[Pass]:
    """Passes of at most `most` tokens, or of one item that cannot be cut."""
    current: list[ScheduledTokens] = []
    left = most
    for item in scheduled:
        if current and item.num_tokens > left and not can_cut(item):
            yield current
            current, left = [], most
        while item.num_tokens > left and can_cut(item):
            if left:
                first, item = _parted(item, left)
                current.append(first)
            yield current
            current, left = [], most
        current.append(item)
        left -= item.num_tokens
        if left <= 0:
            yield current
            current, left = [], most
    if current:
        yield current


def _parted(item: ScheduledTokens, num_first: int) -> tuple[ScheduledTokens, ScheduledTokens]:
    first = replace(item, num_tokens=num_first, samples=False)
    num_rest = item.num_tokens - num_first
    rest = replace(item, start=item.start + num_first, num_tokens=num_rest, new_block_ids=())
    return first, rest
