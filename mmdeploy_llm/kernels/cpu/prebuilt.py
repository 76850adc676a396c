"""Libraries that are compiled when the wheel is made, one for each level of the architecture, so
that a machine without a compiler computes as fast as one that has it.

hatch_build.py imports this file, which with all that it imports needs nothing but the standard
library.
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
# The system and architecture that a wheel with libraries can be made on and for. Windows has none:
# its compilers know neither the vectors nor the assembly of the sources.
PLATFORMS = {
    ("linux", "x86_64"): "manylinux_2_28_x86_64",
    ("linux", "aarch64"): "manylinux_2_28_aarch64",
    ("darwin", "arm64"): "macosx_11_0_arm64",
}
# Versions of the symbols that manylinux_2_28 (PEP 600) allows; the wheel's libraries need no newer.
POLICY = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
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
    """Whether this machine compiles libraries that a wheel can hold."""
    return _target() in PLATFORMS and _is_glibc()


def prebuild(folder: Path) -> str:
    """Compiles a library for each level of this architecture into `folder`. Returns the platform
    that they run on, for the name of the wheel. Raises BuildError."""
    folder.mkdir(parents=True, exist_ok=True)
    system, machine = _target()
    levels = levels_of(machine)
    for level in levels:
        compile_level(level, folder / _name(level))
    is_portable = all(_suits_policy(folder / _name(level)) for level in levels)
    return PLATFORMS[system, machine] if is_portable else f"linux_{machine}"


def _target() -> tuple[str, str]:
    return sys.platform, platform.machine()


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
