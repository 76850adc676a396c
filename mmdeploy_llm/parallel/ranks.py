"""Ranks: the processes that share a model, seen from one of them."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

# For all ranks to come to an exchange; the first is behind loading, which may take one of them
# longer. When a rank is gone, whoever started the ranks ends the others at once.
TIMEOUT = timedelta(minutes=30)
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
    """How one rank finds the others. path: a file that all of them can write, empty at first, and
    there as long as they are. device: where this rank's tensors are. timeout: after which an
    exchange to which not all have come is given up."""

    path: str
    rank: int
    size: int
    device: str
    timeout: timedelta = TIMEOUT

    def join(self) -> Ranks:
        """Returns once all ranks have come."""
        store = dist.FileStore(self.path, self.size)
        if self.device == "cpu":
            return GlooRanks(self, store)
        return NcclRanks(self, store)


class GlooRanks:
    """Over the loopback interface, so that nothing listens to the network."""

    def __init__(self, meeting: Meeting, store: Any) -> None:
        """Raises RuntimeError, as exchanges do, once somebody is missing for too long."""
        self.rank, self.size, self.num_calls = meeting.rank, meeting.size, 0
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = meeting.timeout
        options._threads = 1
        self._group: Any = gloo(store, self.rank, self.size, options)

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
    """One CUDA device a rank. Calls may be captured in a CUDA graph; these, and what a graph calls
    when it is replayed, are not counted. A call returns when it is launched: one that is stuck ends
    the process after the timeout, one in a graph shows in the silence of its rank alone."""

    def __init__(self, meeting: Meeting, store: Any) -> None:
        self.rank, self.size, self.num_calls = meeting.rank, meeting.size, 0
        self._device = device = torch.device(meeting.device)
        # NCCL listens where its ranks meet, and chooses a network before the loopback interface.
        ctypes.CDLL(None).setenv(b"NCCL_SOCKET_IFNAME", b"lo", 0)
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl",
            store=store,
            rank=self.rank,
            world_size=self.size,
            timeout=meeting.timeout,
            device_id=device,
        )

    def sum(self, x: Tensor) -> Tensor:
        """See Ranks."""
        self._count()
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """See Ranks."""
        self._count()
        num_rows, size = x.shape
        parts = x.new_empty(self.size * num_rows, size)
        dist.all_gather_into_tensor(parts, x.contiguous())
        return parts.view(self.size, num_rows, size).transpose(0, 1).reshape(num_rows, -1)

    def least(self, value: int) -> int:
        """See Ranks."""
        return int(self.gather(torch.tensor([[value]], device=self._device)).min())

    def _count(self) -> None:
        self.num_calls += not torch.cuda.is_current_stream_capturing()
