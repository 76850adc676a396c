"""The machine's cores: how many threads suit it, and on which cores they run.

A CPU is what the system schedules a thread on; a core may be two of them (SMT siblings), which
share its arithmetic units, so that a second thread there adds little.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mmdeploy_llm.errors import ConfigError

from .kernels import Kernels

ROOT = Path("/")
CPUS = Path("sys/devices/system/cpu")
NODES = Path("sys/devices/system/node")
CGROUPS = Path("sys/fs/cgroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where threads run. cpus: all that compute and those that they start. pinned: worker i stays
    on the i-th of these; empty: on any of `cpus`. node: whose memory is taken first, None leaves
    that to the system. num_threads: as many as suit it."""

    cpus: tuple[int, ...]
    pinned: tuple[int, ...]
    node: int | None
    num_threads: int


class ComputeThreads:
    """The pool of OpenMP threads, placed. Each thread that calls into it has a pool of its own."""

    def __init__(self, kernels: Kernels, placement: Placement, num_threads: int) -> None:
        self._kernels = kernels
        self._placement = placement
        self._num_threads = num_threads
        self._of_thread = threading.local()

    def place(self) -> None:
        """The calling thread and those that it computes with, from now on; once for each.

        Raises ConfigError when the system refuses.
        """
        if getattr(self._of_thread, "is_placed", False):
            return
        placement = self._placement
        try:
            self._kernels.place_threads(
                placement.cpus,
                placement.pinned,
                self._num_threads,
                node=placement.node,
            )
        except OSError as error:
            raise ConfigError(
                f"the system refuses to place threads on CPUs {_listed(placement.cpus)}, NUMA node "
                f"{placement.node}: {error.strerror}; leave out cpu_affinity and numa_node, or "
                "start the container with the right to set them (CAP_SYS_NICE)"
            ) from error
        self._of_thread.is_placed = True


def usable_cpus() -> tuple[int, ...]:
    """Those this process may use; where the system does not tell, all of them."""
    affinity = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(affinity(0))) if affinity else tuple(range(os.cpu_count() or 1))


def one_of_each_core(cpus: Sequence[int], root: Path = ROOT) -> tuple[int, ...]:
    """The first of `cpus` in each core; all of them where the system does not tell the siblings."""
    chosen: list[int] = []
    taken: set[int] = set()
    for cpu in cpus:
        if cpu not in taken:
            chosen.append(cpu)
            siblings = root / CPUS / f"cpu{cpu}/topology/thread_siblings_list"
            taken.update(_cpu_list(siblings) or (cpu,))
    return tuple(chosen)


def num_suitable_threads(cpus: Sequence[int], root: Path = ROOT) -> int:
    """One for each core of `cpus`, no more than the CPU time that a container may use."""
    num_cores = len(one_of_each_core(cpus, root))
    quota = _cpu_quota(root)
    return num_cores if quota is None else max(1, min(num_cores, round(quota)))


def choose_placement(
    affinity: Literal["auto"] | tuple[int, ...] | None, node: int | None, root: Path = ROOT
) -> Placement | None:
    """What the options cpu_affinity and numa_node come to; None where neither is given.

    Raises ConfigError for CPUs and nodes that are not there or may not be used.
    """
    if affinity is None and node is None:
        return None
    usable = usable_cpus()
    if node is not None:
        usable = _of_node(node, usable, root)
    if isinstance(affinity, tuple):
        surplus = sorted(set(affinity) - set(usable))
        if surplus or not affinity:
            place = "" if node is None else f" on NUMA node {node}"
            raise ConfigError(
                f"cpu_affinity = {_listed(affinity) or 'no CPU'}, but this process may use "
                f"{_listed(usable)}{place}; name some of these, or 'auto'"
            )
        return Placement(cpus=affinity, pinned=affinity, node=node, num_threads=len(affinity))
    pinned = one_of_each_core(usable, root) if affinity == "auto" else ()
    num_threads = num_suitable_threads(usable, root)
    return Placement(cpus=usable, pinned=pinned, node=node, num_threads=num_threads)


def _of_node(node: int, usable: Sequence[int], root: Path) -> tuple[int, ...]:
    cpus = _cpu_list(root / NODES / f"node{node}/cpulist")
    if cpus is None:
        nodes = _cpu_list(root / NODES / "online")
        raise ConfigError(
            f"numa_node = {node}, but this machine has "
            f"{'NUMA nodes ' + _listed(nodes) if nodes else 'no NUMA nodes'}; name one of them or "
            "leave it out"
        )
    both = tuple(cpu for cpu in cpus if cpu in usable)
    if not both:
        raise ConfigError(
            f"numa_node = {node} has the CPUs {_listed(cpus) or 'none'}, but this process may use "
            f"{_listed(usable)}; name another node"
        )
    return both


def _cpu_list(path: Path) -> tuple[int, ...] | None:
    """The numbers in a file such as "0-3,8"; None where there is no such file."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return tuple(numbers)


def _cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time that the process's control group (version 2) has; None without a bound.

    A group is bounded by those above it too.
    """
    try:
        entries = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    own = next((entry[3:] for entry in entries if entry.startswith("0::")), "/")
    group = root / CGROUPS / own.lstrip("/")
    quotas = []
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root / CGROUPS):
            break
        try:
            time, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if time != "max":
            quotas.append(int(time) / int(period))
    return min(quotas, default=None)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
