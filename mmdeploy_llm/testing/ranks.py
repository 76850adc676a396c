"""Ranks in threads of one process: what tensor parallelism computes, without processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
TIMEOUT = 60.0  # seconds until a rank that waits in vain gives up


class ThreadRanks:
    """One of several ranks; see parallel.Ranks."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size, self.num_calls = rank, len(shared.values), 0
        self._shared = shared

    def sum(self, x: Tensor) -> Tensor:
        """See Ranks."""
        parts = self._exchange(x)
        out = parts[0]
        for part in parts[1:]:
            out = out + part
        return out

    def gather(self, x: Tensor) -> Tensor:
        """See Ranks."""
        return torch.cat(self._exchange(x), -1)

    def least(self, value: int) -> int:
        """See Ranks."""
        return int(min(self._exchange(torch.tensor(value))))

    def abort(self) -> None:
        """Ends the waiting of all ranks, and all later exchanges."""
        self._shared.barrier.abort()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """Everybody's tensor, of which all must have the same shape."""
        self.num_calls += 1
        shared = self._shared
        shared.values[self.rank] = x
        shared.barrier.wait(TIMEOUT)
        parts = list(shared.values)
        assert len({part.shape for part in parts}) == 1, "ranks exchange tensors of several shapes"
        shared.barrier.wait(TIMEOUT)
        return parts


class _Shared:
    """What the threads share."""

    def __init__(self, size: int) -> None:
        self.values: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)


def thread_ranks(size: int) -> list[ThreadRanks]:
    """All ranks, for `on_ranks`."""
    shared = _Shared(size)
    return [ThreadRanks(rank, shared) for rank in range(size)]


def on_ranks(ranks: Sequence[ThreadRanks], work: Callable[[ThreadRanks], T]) -> list[T]:
    """What `work` gives on each rank, all at the same time; the first error of any of them is
    raised."""

    def run(own: ThreadRanks) -> T:
        try:
            return work(own)
        except BaseException:
            own.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(run, own) for own in ranks]
    errors = [error for future in futures if (error := future.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
