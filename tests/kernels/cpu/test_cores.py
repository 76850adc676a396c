"""CPU cores: the list that /sys gives, the number of threads that suits them, and where threads
run."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.kernels.cpu import (
    BuildError,
    ComputeThreads,
    choose_placement,
    cores,
    cpu_levels,
    num_suitable_threads,
    usable_cpus,
    usable_nodes,
)
from mmdeploy_llm.kernels.cpu.cores import one_of_each_core

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/sys is Linux's")


@pytest.fixture
def machine(tmp_path):
    """Writes a /sys and /proc with four cores of two CPUs each, (0, 4) to (3, 7), on two nodes."""
    files = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list":
             f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)}  # fmt: skip
    files["sys/devices/system/node/online"] = "0-2\n"
    files["sys/devices/system/node/node0/cpulist"] = "0-1,4-5\n"
    files["sys/devices/system/node/node1/cpulist"] = "2-3,6-7\n"
    files["sys/devices/system/node/node2/cpulist"] = "\n"  # memory alone
    for name, text in files.items():
        write(tmp_path / name, text)
    return tmp_path


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def eight_cpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def test_one_of_each_core(machine, tmp_path):
    assert one_of_each_core(range(8), machine) == (0, 1, 2, 3)
    assert one_of_each_core((3, 4, 5, 7), machine) == (3, 4, 5)
    assert one_of_each_core((0, 1), tmp_path / "nothing") == (0, 1)


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 4), ("200000 100000", 2), ("50000 100000", 1), ("900000 100000", 4), ("", 4)],
)
def test_a_container_has_a_share_of_the_cpus(machine, quota, expected):
    write(machine / "proc/self/cgroup", "4:memory:/elsewhere\n0::/pod/main\n")
    write(machine / "sys/fs/cgroup/pod/main/cpu.max", "max 100000\n")
    write(machine / "sys/fs/cgroup/pod/cpu.max", quota)
    assert num_suitable_threads(range(8), machine) == expected


def test_nodes_of_which_this_process_has_cores(machine, monkeypatch):
    monkeypatch.setattr(cores, "c_library", lambda: SimpleNamespace(syscall=lambda *_: 0))
    found = usable_nodes(range(8), machine)
    assert [(node.number, node.num_cores) for node in found] == [(0, 2), (1, 2)]
    found = usable_nodes((0, 4, 2, 3), machine)
    assert [(node.number, node.num_cores) for node in found] == [(0, 1), (1, 2)]
    assert usable_nodes(range(8), machine / "nothing") == ()
    monkeypatch.setattr(cores, "c_library", lambda: SimpleNamespace(syscall=lambda *_: -1))
    assert usable_nodes(range(8), machine) == ()  # as in a container


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("affinity", "node", "cpus", "pinned", "num_threads"),
    [
        ("auto", None, range(8), (0, 1, 2, 3), 4),
        ("auto", 1, (2, 3, 6, 7), (2, 3), 2),
        (None, 0, (0, 1, 4, 5), (), 2),
        ((6, 2, 3), None, (6, 2, 3), (6, 2, 3), 3),
        ((7, 2), 1, (7, 2), (7, 2), 2),
    ],
)
def test_placements(machine, affinity, node, cpus, pinned, num_threads):
    found = choose_placement(affinity, node, machine)
    assert (found.cpus, found.pinned, found.node) == (tuple(cpus), pinned, node)
    assert found.num_threads == num_threads


def test_no_options_place_nothing(machine):
    assert choose_placement(None, None, machine) is None


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("affinity", "node", "message"),
    [
        ((1, 9), None, "cpu_affinity = 1, 9, but this process may use 0, 1, 2, 3, 4, 5, 6, 7;"),
        ((1, 2), 1, "may use 2, 3, 6, 7 on NUMA node 1"),
        ((), None, "cpu_affinity = no CPU"),
        (None, 3, "numa_node = 3, but this machine has NUMA nodes 0, 1, 2"),
        ("auto", 2, "numa_node = 2 has the CPUs none"),
    ],
)
def test_wrong_options(machine, affinity, node, message):
    with pytest.raises(ConfigError, match=message):
        choose_placement(affinity, node, machine)


def test_without_numa_nodes(tmp_path):
    with pytest.raises(ConfigError, match="this machine has no NUMA nodes"):
        choose_placement(None, 0, tmp_path)


class Refusing:
    """Kernels on a system that does not allow it."""

    calls = 0

    def place_threads(self, *args, **options):
        self.calls += 1
        raise PermissionError(1, "Operation not permitted")


class Counting(Refusing):
    def place_threads(self, *args, **options):
        self.calls += 1


def test_a_system_that_refuses():
    threads = ComputeThreads(Refusing(), choose_placement((usable_cpus()[0],), None), 1)
    with pytest.raises(ConfigError, match="Operation not permitted; leave out cpu_affinity"):
        threads.place()


def test_once_for_each_thread():
    kernels = Counting()
    threads = ComputeThreads(kernels, choose_placement("auto", None), 1)
    for _ in range(2):
        threads.place()
        other = threading.Thread(target=threads.place)
        other.start()
        other.join()
    assert kernels.calls == 3


PROGRAM = """
import pathlib, sys, threading
import torch
from mmdeploy_llm.kernels.cpu import ComputeThreads, choose_placement, load
kernels = load(pathlib.Path(sys.argv[1]))
affinity, node = eval(sys.argv[2])
torch.set_num_threads(3)
placement = choose_placement(affinity, node)
def allowed():
    fields = [path.read_text().split() for path in pathlib.Path("/proc/self/task").glob("*/status")]
    return {row[row.index("Pid:") + 1]: row[row.index("Cpus_allowed_list:") + 1] for row in fields}
before = allowed()
ComputeThreads(kernels, placement, 3).place()
own = str(threading.get_native_id())
print(sorted(cpus for thread, cpus in allowed().items() if thread not in before))
print(allowed()[own], before[own])
"""


def placed(build_kernels, affinity, node):
    """Returns the CPUs of the two workers and of the calling thread, read from the system."""
    try:
        folder = build_kernels(cpu_levels()[0]).parent
    except BuildError as error:
        pytest.skip(f"no kernels on this machine: {error}")
    command = [sys.executable, "-c", PROGRAM, str(folder), repr((affinity, node))]
    done = subprocess.run(command, capture_output=True, text=True)
    if node is not None and "the system refuses" in done.stderr:
        pytest.skip("this container may not choose where memory comes from")
    assert done.returncode == 0, done.stderr
    workers, callers = done.stdout.splitlines()
    return eval(workers), callers.split()


@pytest.mark.full
def test_workers_stay_where_they_are_put(build_kernels):
    cpus = usable_cpus()
    last = cpus[-1]
    workers, (now, _) = placed(build_kernels, (last,), None)
    assert (workers, now) == ([str(last)] * 2, str(last))
    workers, (now, before) = placed(build_kernels, "auto", None)
    cores = one_of_each_core(cpus)
    assert workers == sorted(str(cores[i % len(cores)]) for i in (1, 2))
    assert now == before


@pytest.mark.full
@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").exists(), reason="this machine tells no NUMA nodes"
)
def test_a_node(build_kernels):
    workers, (now, before) = placed(build_kernels, None, 0)
    assert workers == [now, now]
    if not Path("/sys/devices/system/node/node1").exists():
        assert now == before
