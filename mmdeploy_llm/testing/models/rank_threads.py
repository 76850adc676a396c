"""Ranks as threads of one process, to test tensor parallelism without child processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
TIMEOUT = 60.0  # seconds until a collective fails that not all ranks have joined


class ThreadRanks:
    """One rank, run by one thread; implements system.sharding.Ranks."""

    def __init__(self, rank: int, shared: _Shared) -> None:
        self.rank, self.size, self.num_calls = rank, len(shared.values), 0
        self._shared = shared

    def sum(self, x: Tensor) -> Tensor:
        """See Ranks."""
        tensors = self._exchange(x)
        out = tensors[0]
        for tensor in tensors[1:]:
            out = out + tensor
        return out

    def gather(self, x: Tensor) -> Tensor:
        """See Ranks."""
        return torch.cat(self._exchange(x), -1)

    def least(self, value: int) -> int:
        """See Ranks."""
        return int(min(self._exchange(torch.tensor(value))))

    def abort(self) -> None:
        """Makes all current and later collectives fail."""
        self._shared.barrier.abort()

    def _exchange(self, x: Tensor) -> list[Tensor]:
        """Returns the tensors of all ranks, which must have the same shape."""
        self.num_calls += 1
        shared = self._shared
        shared.values[self.rank] = x
        shared.barrier.wait(TIMEOUT)
        tensors = list(shared.values)
        assert len({each.shape for each in tensors}) == 1, "the ranks' tensors differ in shape"
        shared.barrier.wait(TIMEOUT)
        return tensors


class _Shared:
    """State that the threads share: one tensor per rank, and a barrier."""

    def __init__(self, size: int) -> None:
        self.values: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)


def thread_ranks(size: int) -> list[ThreadRanks]:
    """Returns all ranks of a new group, for `on_ranks`."""
    shared = _Shared(size)
    return [ThreadRanks(rank, shared) for rank in range(size)]


def on_ranks(ranks: Sequence[ThreadRanks], work: Callable[[ThreadRanks], T]) -> list[T]:
    """Runs `work` on all ranks concurrently; returns their results. Raises the error of a rank,
    preferably one that is not a consequence of another rank's error."""

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
