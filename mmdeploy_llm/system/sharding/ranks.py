"""Ranks: one process's view of the group that shares a sharded model, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

from mmdeploy_llm.system.portable.libraries import c_library

# The time for all ranks to join a collective. The first one comes after loading, whose duration
# varies between ranks. When a rank dies, the parent process ends the others at once.
TIMEOUT = timedelta(minutes=30)
LOOPBACK = "127.0.0.1"
dist: Any = torch.distributed  # its type stubs lack names that are used here


class Ranks(Protocol):
    """A group of ranks, as one of them sees it.

    All ranks must make the same calls in the same order, with tensors of the same shape.
    rank: this rank, 0 .. size - 1.
    num_calls: number of collectives so far, equal on all ranks while they are in step.
    """

    rank: int
    size: int
    num_calls: int

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce: returns the sum over all ranks, bit-equal on each; may overwrite `x`."""

    def gather(self, x: Tensor) -> Tensor:
        """All-gather: [N, n] of each rank -> [N, size * n], concatenated in the order of ranks."""

    def least(self, value: int) -> int:
        """Returns the minimum of `value` over all ranks."""


class FirstRank:
    """Rank 0 before it has joined the group: can be used to shard a model, not to run it."""

    def __init__(self, size: int) -> None:
        self.rank, self.size, self.num_calls = 0, size, 0

    def sum(self, x: Tensor) -> Tensor:
        """Raises AssertionError: rank 0 cannot compute alone."""
        raise AssertionError("rank 0 has not joined the other ranks yet")

    gather = sum

    def least(self, value: int) -> int:
        """Returns `value`."""
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The rendezvous of one rank with the others.

    path: a file that all ranks can write; empty at first, must exist as long as the ranks run.
    device: the device of this rank's tensors.
    timeout: time after which a collective fails that not all ranks have joined.
    """

    path: str
    rank: int
    size: int
    device: str
    timeout: timedelta = TIMEOUT

    def join(self) -> Ranks:
        """Joins the group; returns once all ranks have joined."""
        store = dist.FileStore(self.path, self.size)
        if self.device == "cpu":
            return GlooRanks(self, store)
        return NcclRanks(self, store)


class GlooRanks:
    """Calls the collectives of Gloo, over the loopback interface only, so that no port is open to
    the network."""

    def __init__(self, meeting: Meeting, store: Any) -> None:
        """Joins the group. Raises RuntimeError, as collectives do, when a rank is missing at the
        timeout."""
        self.rank, self.size, self.num_calls = meeting.rank, meeting.size, 0
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOOPBACK)]
        options._timeout = meeting.timeout
        options._threads = 1
        self._group: Any = gloo(store, self.rank, self.size, options)

    def sum(self, x: Tensor) -> Tensor:
        """Sums over all ranks; see Ranks."""
        self.num_calls += 1
        x = x.contiguous()
        self._group.allreduce([x]).wait()
        # The group's call is not a torch operation; this zero_ shows recorders that `x` is written.
        x[:0].zero_()
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Concatenates the tensors of all ranks; see Ranks."""
        self.num_calls += 1
        shards = [torch.empty_like(x) for _ in range(self.size)]
        self._group.allgather([shards], [x.contiguous()]).wait()
        return torch.cat(shards, -1)

    def least(self, value: int) -> int:
        """Returns the minimum over all ranks."""
        return int(self.gather(torch.tensor([[value]])).min())


class NcclRanks:
    """Calls the collectives of NCCL, with one CUDA device per rank.

    A call returns once it is launched. A collective that hangs ends the process at the timeout;
    one replayed in a CUDA graph has no timeout, so that only the rank's missing answer reveals it.
    `num_calls` counts neither captured nor replayed calls.
    """

    def __init__(self, meeting: Meeting, store: Any) -> None:
        self.rank, self.size, self.num_calls = meeting.rank, meeting.size, 0
        self._device = device = torch.device(meeting.device)
        # NCCL prefers a network interface to loopback, and would listen on it.
        if (library := c_library()) is not None:
            library.setenv(b"NCCL_SOCKET_IFNAME", b"lo", 0)
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
        """Launches the sum over all ranks; see Ranks."""
        self._count()
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Launches the concatenation of all ranks' tensors; see Ranks."""
        self._count()
        num_rows, size = x.shape
        shards = x.new_empty(self.size * num_rows, size)
        dist.all_gather_into_tensor(shards, x.contiguous())
        return shards.view(self.size, num_rows, size).transpose(0, 1).reshape(num_rows, -1)

    def least(self, value: int) -> int:
        """Returns the minimum over all ranks; waits for the device."""
        return int(self.gather(torch.tensor([[value]], device=self._device)).min())

    def _count(self) -> None:
        self.num_calls += not torch.cuda.is_current_stream_capturing()
