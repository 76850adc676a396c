"""The memory and the CPUs of the machine."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

from .cgroups import memory_left, within_quota

UNKNOWN_RAM = 4 * 2**30  # bytes; what a machine that runs models has at least


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX of Windows."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("total", "free", "file", "page", "virtual", "own")),
        ("extended", ctypes.c_uint64),
    )


def free_ram() -> int:
    """Returns the bytes that this process can have now where the system reports it (Linux,
    Windows), at most what its control groups leave, such as those of a container; else half of the
    RAM, of UNKNOWN_RAM where not even that is known."""
    left = memory_left()
    return _free_ram() if left is None else min(left, _free_ram())


def _free_ram() -> int:
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(AttributeError, OSError):
        status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
        if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # type: ignore[attr-defined,unused-ignore]
            return int(status.free)
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return UNKNOWN_RAM // 2


def usable_cpus() -> tuple[int, ...]:
    """Returns the CPUs that the calling thread may run on; all where the system does not tell."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def num_cpus() -> int:
    """Returns how many CPUs' time the calling thread and those that it starts can have: those that
    it may run on, and no more than its control groups give."""
    return within_quota(len(usable_cpus()))


def run_on(cpus: tuple[int, ...]) -> bool:
    """Restricts the calling thread to these CPUs; returns False where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    os.sched_setaffinity(0, cpus)
    return True
