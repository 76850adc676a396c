"""Libraries that are compiled when the wheel is made, one for each level of x86-64 processors, so
that a machine without a compiler computes as fast as one that has it.

setup.py loads this file and build.py by their paths: both import nothing but the standard library.
"""

from __future__ import annotations

import logging
import platform
import re
import sys
import sysconfig
from pathlib import Path

from .build import Level, compile_level, levels_of, source_digest
from .sealed import BuildError, is_intact

__all__ = ["BuildError", "can_prebuild", "find_prebuilt", "prebuild"]

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent / "prebuilt"
# Versions of the symbols that manylinux_2_28 (PEP 600) allows; the wheel's libraries need no newer.
POLICY = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
PLATFORM = "manylinux_2_28_x86_64"
SYMBOL = re.compile(rb"\0(GLIBCXX|GLIBC|CXXABI|GCC)_(\d+(?:\.\d+)+)(?=\0)")


def find_prebuilt(level: Level, folder: Path = FOLDER) -> Path | None:
    """Returns the library for `level` that was compiled from exactly these sources with these
    flags, None when there is none, or it is damaged, which is logged."""
    path = folder / _name(level)
    if not path.exists():
        return None
    if not is_intact(path):
        logger.warning("%s of the wheel is damaged and is not used; install the wheel again", path)
        return None
    return path


def can_prebuild() -> bool:
    """Whether this machine compiles libraries that a wheel for x86-64 Linux can hold."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and _is_glibc()


def prebuild(folder: Path) -> str:
    """Compiles a library for each level into `folder`. Returns the platform that they run on, for
    the name of the wheel. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    levels = levels_of("x86_64")
    for level in levels:
        compile_level(level, folder / _name(level))
    is_portable = all(_suits_policy(folder / _name(level)) for level in levels)
    return PLATFORM if is_portable else "linux_x86_64"


def _name(level: Level) -> str:
    return f"{level.value}-{source_digest(level)}.so"


def _is_glibc() -> bool:
    return "musl" not in (sysconfig.get_config_var("SOABI") or "")


def _suits_policy(library: Path) -> bool:
    """Whether every versioned symbol that the library needs is old enough."""
    found = SYMBOL.findall(library.read_bytes())
    return all(
        tuple(int(part) for part in version.split(b".")) <= POLICY[name.decode()]
        for name, version in found
    )
