"""Reads what the control groups of Linux, of version 1 or 2, let this process have of the machine:
those of containers, of services and of jobs of a cluster. Elsewhere there are none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
MOUNT = Path("sys/fs/cgroup")
MEMORY_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")
MEMORY_IN_USE = ("memory.current", "memory.usage_in_bytes")
# In memory.stat, for a group and those in it. What files have in memory the system takes back.
FILE_PAGES = frozenset({"inactive_file", "active_file"})
V1_PREFIX = "total_"


def memory_left(root: Path = ROOT) -> int | None:
    """Returns the bytes that the process's groups may have besides what they use now, pages of
    files not counted; of nested groups, the least. None where no group says."""
    left = []
    for folder in _groups("memory", root):
        limits = [found for name in MEMORY_LIMITS if (found := _number(folder / name)) is not None]
        used = [found for name in MEMORY_IN_USE if (found := _number(folder / name)) is not None]
        if limits and used:
            left.append(max(0, min(limits) - max(0, used[0] - _file_pages(folder))))
    return min(left, default=None)


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns how many CPUs' time the process's groups may take; of nested groups, the least. None
    where nothing limits it."""
    quotas = []
    for folder in _groups("cpu", root):
        time, _, period = _text(folder / "cpu.max").partition(" ")
        time = time or _text(folder / "cpu.cfs_quota_us")
        period = period or _text(folder / "cpu.cfs_period_us")
        if time.isdecimal() and period.isdecimal() and int(period):  # not "max", and not "-1"
            quotas.append(int(time) / int(period))
    return min(quotas, default=None)


def within_quota(count: int, root: Path = ROOT) -> int:
    """Returns a number of threads, but no more than the groups give CPUs' time for."""
    quota = cpu_quota(root)
    return count if quota is None else max(1, min(count, round(quota)))


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """Yields the folders of the process's groups, with those that they are in, up to the mount. In
    a container the mount may be its own group, whatever path the process is told."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, names_and_path = line.partition(":")
        names, _, path = names_and_path.partition(":")
        if names and controller not in names.split(","):
            continue
        for mount in dict.fromkeys((names, controller)) if names else ("", "unified"):
            top = root / MOUNT / mount
            group = top / path.lstrip("/")
            yield from (group, *(folder for folder in group.parents if folder.is_relative_to(top)))


def _file_pages(folder: Path) -> int:
    found = {}
    for line in _text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name.removeprefix(V1_PREFIX) in FILE_PAGES and value.isdecimal():
            found[name] = int(value)
    whole = {name: value for name, value in found.items() if name.startswith(V1_PREFIX)}
    return sum((whole or found).values())


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """Returns the text of a file, "" where it cannot be read."""
    with suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read().strip()
    return ""
