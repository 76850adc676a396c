"""Ranks: the processes that share a model, seen from one of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

# Nobody waits that long: whoever started the ranks ends them all when one is gone.
TIMEOUT = timedelta(hours=2)
LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # its stubs do not name what we use


class Ranks(Protocol):
    """rank: 0 .. size - 1. num_calls: exchanges so far, the same on all ranks that do the same.

    All ranks make the same calls in the same order, with tensors of the same shape.
    """

    rank: int
    size: int
    num_calls: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, bit-equal on each of them; may be written into `x`."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[N, n] of each rank -> [N, size * n], side by side in the order of the ranks."""
        ...

    def least(self, value: int) -> int:
        """The smallest `value` of all ranks."""
        ...


class FirstRank:
    """Rank 0 before it meets the others: enough to divide a model, not to run it."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.num_calls = 0, size, 0

    def sum(self, x: Tensor) -> Tensor:
        """See Ranks."""
        raise AssertionError("the others are not there")

    gather = sum

    def least(self, value: int) -> int:
        """See Ranks."""
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """How one rank finds the others. path: a file that all of them can write, empty at first.
    device: where this rank's tensors are."""

    path: str
    rank: int
    size: int
    device: str

    def join(self) -> Ranks:
        """Returns once all ranks have come."""
        store = dist.FileStore(self.path, self.size)
        if self.device == "cpu":
            return GlooRanks(store, self.rank, self.size)
        return NcclRanks(store, self.rank, self.size, torch.device(self.device))


class GlooRanks:
    """Over the loopback interface, so that nothing listens to the network."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size, self.num_calls = rank, size, 0
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = TIMEOUT
        options._threads = 1
        self._group: Any = gloo(store, rank, size, options)

    def sum(self, x: Tensor) -> Tensor:
        """See Ranks."""
        self.num_calls += 1
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        # The group's call is none of torch's operations: whoever records those would miss it.
        x[:0].zero_()
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See Ranks."""
        self.num_calls += 1
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return torch.cat(parts, -1)

    def least(self, value: int) -> int:
        """See Ranks."""
        return int(self.gather(torch.tensor([[value]])).min())


class NcclRanks:
    """One CUDA device a rank. Calls may be captured in a CUDA graph."""

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        self.rank, self.size, self.num_calls = rank, size, 0
        self._device = device
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", store=store, rank=rank, world_size=size, timeout=TIMEOUT, device_id=device
        )

    def sum(self, x: Tensor) -> Tensor:
        """See Ranks."""
        self.num_calls += 1
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See Ranks."""
        self.num_calls += 1
        num_rows, size = x.shape
        parts = x.new_empty(self.size * num_rows, size)
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.view(self.size, num_rows, size).transpose(0, 1).reshape(num_rows, -1)

    def least(self, value: int) -> int:
        """See Ranks."""
        return int(self.gather(torch.tensor([[value]], device=self._device)).min())
