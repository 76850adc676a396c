"""The machine's cores: how many threads to compute with, and on which cores they run.

A CPU is what the system schedules a thread on. A core may be two CPUs (SMT siblings), which share
its arithmetic units, so that a second thread on a core adds little.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels.base import Kernels
from mmdeploy_llm.system.portable import cgroups, machine
from mmdeploy_llm.system.portable.libraries import c_library

from .openmp import end_pool, pool_number

ROOT = Path("/")
CPUS = Path("sys/devices/system/cpu")
NODES = Path("sys/devices/system/node")
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # numbers of the system calls
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The CPUs that threads run on.

    cpus: for all compute threads and the threads that they start.
    pinned: compute thread i runs only on the i-th of these; empty: on any of `cpus`.
    node: NUMA node whose memory is used first; None: the system decides.
    num_threads: number of compute threads that suits these CPUs.
    """

    cpus: tuple[int, ...]
    pinned: tuple[int, ...]
    node: int | None
    num_threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NumaNode:
    """A NUMA node, and how many cores of it this process may use."""

    number: int
    num_cores: int


class ComputeThreads:
    """Places the OpenMP threads of each thread that computes; every such thread has its own
    pool."""

    def __init__(self, kernels: Kernels, placement: Placement, num_threads: int) -> None:
        self._kernels = kernels
        self._placement = placement
        self._num_threads = num_threads
        self._local = threading.local()

    def place(self) -> None:
        """Places the calling thread and its pool, unless it did so before.

        Raises ConfigError when the system refuses.
        """
        if getattr(self._local, "pool", None) == pool_number():
            return
        placement = self._placement
        if not hasattr(self._local, "pool"):
            _PLACED.enter()
            self._local.pool = None
        try:
            self._kernels.place_threads(
                placement.cpus,
                placement.pinned,
                self._num_threads,
                node=placement.node,
            )
        except OSError as error:
            raise ConfigError(
                f"the system refuses to place threads on CPUs {_joined(placement.cpus)}, NUMA node "
                f"{placement.node}: {error.strerror}; leave out cpu_affinity and numa_node, or "
                "start the container with the right to set them (CAP_SYS_NICE)"
            ) from error
        self._local.pool = pool_number()

    def put_back(self) -> None:
        """Undoes `place` for the calling thread, once no other engine has placed it: it may run on
        its former CPUs and take memory from any node, and the threads of its pool end. Does nothing
        in a thread that was not placed."""
        if hasattr(self._local, "pool"):
            del self._local.pool
            _PLACED.leave()


class _PlacedThread(threading.local):
    """The former CPUs of a thread that engines have placed, and the number of these engines."""

    def __init__(self) -> None:
        self._num_engines = 0
        self._before: tuple[int, ...] = ()

    def enter(self) -> None:
        """Remembers the thread's CPUs before its first placement."""
        if not self._num_engines:
            self._before = usable_cpus()
        self._num_engines += 1

    def leave(self) -> None:
        """Puts the thread back when the last engine leaves it."""
        self._num_engines -= 1
        if self._num_engines:
            return
        end_pool()
        if not machine.run_on(self._before):
            return
        number = SET_MEMPOLICY.get(platform.machine())
        if number is not None and (library := c_library()) is not None:
            library.syscall(number, 0, None, 0)  # MPOL_DEFAULT


_PLACED = _PlacedThread()


def own_choice(num_threads: int, cpus: Sequence[int], root: Path = ROOT) -> int | None:
    """Returns num_threads, torch's number of threads, if the program has set it, by
    torch.set_num_threads or OMP_NUM_THREADS. None if torch may have chosen it: as many as these
    CPUs, or all, have cores or, in a torch without MKL, as there are CPUs."""
    everything = tuple(range(os.cpu_count() or 1))
    defaults = {len(one_of_each_core(some, root)) for some in (cpus, everything)}
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        defaults |= {len(cpus), len(everything)}
    return None if num_threads in defaults else num_threads


def usable_cpus() -> tuple[int, ...]:
    """Returns the CPUs that this process may use; all CPUs where the system does not report
    them."""
    return machine.usable_cpus()


def one_of_each_core(cpus: Sequence[int], root: Path = ROOT) -> tuple[int, ...]:
    """Returns the first of `cpus` in each core; all `cpus` where the system does not report SMT
    siblings."""
    chosen: list[int] = []
    covered: set[int] = set()
    for cpu in cpus:
        if cpu not in covered:
            chosen.append(cpu)
            siblings = root / CPUS / f"cpu{cpu}/topology/thread_siblings_list"
            covered.update(_cpu_list(siblings) or (cpu,))
    return tuple(chosen)


def num_suitable_threads(cpus: Sequence[int], root: Path = ROOT) -> int:
    """Returns one thread per core of `cpus`, but no more than the CPU quota of the container."""
    return cgroups.within_quota(len(one_of_each_core(cpus, root)), root)


def usable_nodes(cpus: Sequence[int], root: Path = ROOT) -> tuple[NumaNode, ...]:
    """Returns the NUMA nodes that have some of `cpus`; none where the system does not tell, or does
    not let this process choose the node of its memory, as in most containers."""
    number = GET_MEMPOLICY.get(platform.machine())
    library = c_library()
    if number is None or library is None or library.syscall(number, 0, None, 0, None, 0) != 0:
        return ()
    found = []
    for node in _cpu_list(root / NODES / "online") or ():
        own = set(_cpu_list(root / NODES / f"node{node}/cpulist") or ())
        num_cores = len(one_of_each_core([cpu for cpu in cpus if cpu in own], root))
        if num_cores:
            found.append(NumaNode(number=node, num_cores=num_cores))
    return tuple(found)


def choose_placement(
    affinity: Literal["auto"] | tuple[int, ...] | None, node: int | None, root: Path = ROOT
) -> Placement | None:
    """Resolves the options cpu_affinity and numa_node; None when neither is given.

    Raises ConfigError for CPUs and nodes that do not exist or may not be used.
    """
    if affinity is None and node is None:
        return None
    usable = usable_cpus()
    if node is not None:
        usable = _cpus_of_node(node, usable, root)
    if isinstance(affinity, tuple):
        surplus = sorted(set(affinity) - set(usable))
        if surplus or not affinity:
            where = "" if node is None else f" on NUMA node {node}"
            raise ConfigError(
                f"cpu_affinity = {_joined(affinity) or 'no CPU'}, but this process may use "
                f"{_joined(usable)}{where}; name some of these, or 'auto'"
            )
        return Placement(cpus=affinity, pinned=affinity, node=node, num_threads=len(affinity))
    pinned = one_of_each_core(usable, root) if affinity == "auto" else ()
    num_threads = num_suitable_threads(usable, root)
    return Placement(cpus=usable, pinned=pinned, node=node, num_threads=num_threads)


def _cpus_of_node(node: int, usable: Sequence[int], root: Path) -> tuple[int, ...]:
    cpus = _cpu_list(root / NODES / f"node{node}/cpulist")
    if cpus is None:
        nodes = _cpu_list(root / NODES / "online")
        raise ConfigError(
            f"numa_node = {node}, but this machine has "
            f"{'NUMA nodes ' + _joined(nodes) if nodes else 'no NUMA nodes'}; name one of them or "
            "leave it out"
        )
    both = tuple(cpu for cpu in cpus if cpu in usable)
    if not both:
        raise ConfigError(
            f"numa_node = {node} has the CPUs {_joined(cpus) or 'none'}, but this process may use "
            f"{_joined(usable)}; name another node"
        )
    return both


def _cpu_list(path: Path) -> tuple[int, ...] | None:
    """Parses a file such as "0-3,8"; None if there is no such file."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    numbers: list[int] = []
    for interval in filter(None, text.split(",")):
        first, _, last = interval.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _joined(cpus: Sequence[int]) -> str:
    return ", ".join(map(str, cpus))
