"""Limits of this process, and the memory that it has taken."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from functools import cache
from typing import Literal

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment,unused-ignore]

logger = logging.getLogger(__name__)

Limit = Literal["memory", "seconds", "core"]
NAMES = {"memory": "RLIMIT_AS", "seconds": "RLIMIT_CPU", "core": "RLIMIT_CORE"}
UNLIMITED = (
    "this system cannot limit the memory of a process: one that reads media, templates or tables "
    "of strangers ends by its deadline only; give such files to a machine with Linux"
)


def has_limits() -> bool:
    """Whether the memory of a process can be limited. macOS has the call, and no effect of it."""
    return resource is not None and sys.platform != "darwin"


@cache
def tell_what_is_unlimited() -> None:
    """Says once what this system cannot bound; for whoever starts a process that it would bound."""
    if not has_limits():
        logger.warning(UNLIMITED)


def set_limit(limit: Limit, value: int) -> None:
    """Sets a limit of this process, at most the highest that it may have; does nothing where the
    system has none. memory: bytes of its address space. seconds: of processor time. core: bytes of
    a core file."""
    if resource is None or not hasattr(resource, NAMES[limit]):
        return
    number = getattr(resource, NAMES[limit])
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(number)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, hard))


def address_space() -> int | None:
    """Returns the bytes of address space that this process has now; None where only a limit of all
    of it could be set, which the system does not tell (all but Linux)."""
    if resource is None:
        return None
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
    return None


def peak_memory() -> int:
    """Returns the largest memory that this process has had, in bytes; 0 where the system does not
    tell it."""
    if resource is None:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
