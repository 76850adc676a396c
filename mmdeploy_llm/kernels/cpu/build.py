"""Builds the library once for each version of sources, flags and compiler, and keeps it in the
user's cache.

    cpp/*/*.cpp --compiler, all at the same time--> objects --linker--> kernels.so + its seal
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path

from mmdeploy_llm.system.portable.machine import num_cpus

from .sealed import BuildError, check_owner, is_intact, write_sealed

logger = logging.getLogger(__name__)

CPP = Path(__file__).parent.parent / "cpp"
CALLS = CPP / "layers"
SOURCES = tuple(CPP / name for name in ("layers", "experts", "products", "sampling", "states"))
UNITS = tuple(sorted(CPP.glob("*/*.cpp")))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
)
# How compilers are told of OpenMP, and linkers that its runtime, torch's, comes later, and to leave
# out the names of functions that nobody calls from outside. The oldest macOS on processors of Apple
# is 11.
OPENMP = {"darwin": ("-Xclang", "-fopenmp", "-mmacosx-version-min=11.0")}
LINKING = {
    "darwin": ("-undefined", "dynamic_lookup", "-mmacosx-version-min=11.0"),
    "linux": ("-Wl,--strip-all",),
}
TIMEOUT = 600.0  # seconds: minutes on a machine that is slow and busy


class Level(Enum):
    """The instruction sets to build for, best first. The value is the level's name in options."""

    AMX = "amx"
    AVX512_BF16 = "avx512_bf16"
    AVX512_VNNI = "avx512_vnni"
    AVX512 = "avx512"
    AVX2_VNNI = "avx2_vnni"
    AVX2 = "avx2"
    NEON_BF16 = "neon_bf16"
    NEON_I8MM = "neon_i8mm"
    NEON_DOT = "neon_dot"
    PORTABLE = "portable"

    @property
    def flags(self) -> tuple[str, ...]:
        """The compiler flags that allow the level's instructions, and no others."""
        return _FLAGS[self]


_V4 = ("-march=x86-64-v4", "-mprefer-vector-width=512")
_FLAGS = {
    Level.AMX: (*_V4, "-mavx512bf16", "-mavx512vnni", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
    Level.AVX512_BF16: (*_V4, "-mavx512bf16", "-mavx512vnni"),
    Level.AVX512_VNNI: (*_V4, "-mavx512vnni"),
    Level.AVX512: _V4,
    Level.AVX2_VNNI: ("-march=x86-64-v3", "-mavxvnni"),
    Level.AVX2: ("-march=x86-64-v3",),
    Level.NEON_BF16: ("-march=armv8.2-a+dotprod+i8mm+bf16",),
    Level.NEON_I8MM: ("-march=armv8.2-a+dotprod+i8mm",),
    Level.NEON_DOT: ("-march=armv8.2-a+dotprod",),
    Level.PORTABLE: (),
}
# What a processor must have, in the words of torch.cpu.get_capabilities.
_AVX512 = {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"}
_AVX2 = {"avx2", "fma3", "f16c"}
_NEEDS = {
    Level.AMX: _AVX512 | {"avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "amx_int8"},
    Level.AVX512_BF16: _AVX512 | {"avx512_bf16", "avx512_vnni"},
    Level.AVX512_VNNI: _AVX512 | {"avx512_vnni"},
    Level.AVX512: _AVX512,
    Level.AVX2_VNNI: _AVX2 | {"avx_vnni"},
    Level.AVX2: _AVX2,
    Level.NEON_BF16: {"dot", "i8mm", "bf16"},
    Level.NEON_I8MM: {"dot", "i8mm"},
    Level.NEON_DOT: {"dot"},
    Level.PORTABLE: set(),
}


class NoCompilerError(BuildError):
    """Raised when there is no C++ compiler."""


class CompilerError(BuildError):
    """Raised when the compiler or its assembler fails, as one that is older than a level's
    instructions does."""


def levels_of(machine: str) -> tuple[Level, ...]:
    """Returns the levels of processors of an architecture, best first. machine: its name, as
    platform.machine gives it."""
    is_x86, is_arm = machine.lower() in ("x86_64", "amd64"), machine.lower() in ("aarch64", "arm64")
    arm = (Level.NEON_BF16, Level.NEON_I8MM, Level.NEON_DOT)
    own = {Level.PORTABLE: True} | dict.fromkeys(arm, is_arm)
    return tuple(level for level in Level if own.get(level, is_x86))


def cpu_levels() -> tuple[Level, ...]:
    """Returns the levels that this processor can execute, best first."""
    import torch  # not above: hatch_build.py compiles without torch

    has = {name for name, value in torch.cpu.get_capabilities().items() if value}
    # A process must ask the system for the registers of AMX, and not every sandbox grants them.
    if _NEEDS[Level.AMX] <= has and not torch.cpu._init_amx():
        has -= {"amx_tile"}
    return tuple(level for level in levels_of(platform.machine()) if _NEEDS[level] <= has)


def build(level: Level, cache: Path, flags: Sequence[str] = ()) -> Path:
    """Returns the path of the library for `level` in `cache`, after building it if it is missing or
    damaged, which is logged. flags: additional compiler flags. Raises BuildError, and ForeignError
    for a folder or a library that other users own or may write.

    Several processes may build at once: each writes a file of its own and renames it.
    """
    command = _command(level, flags)
    path = cache / f"kernels-{_digest(command)}.so"
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_owner(cache)
        if path.exists():
            check_owner(path)
            if is_intact(path):
                return path
            logger.warning("%s is damaged and is compiled again", path)
        _check_flags(command[0], level)
        logger.warning(
            "compiling the CPU kernels for %s, once, which takes up to a minute; they are kept in "
            "%s",
            level.value,
            cache,
        )
        _build_into(command, path)
    except OSError as error:
        raise BuildError(f"the kernels cannot be written to {cache}: {error}") from error
    return path


def compile_level(level: Level, path: Path) -> None:
    """Compiles the library for `level` into the file `path`. Raises BuildError."""
    _build_into(_command(level), path)


def source_digest(level: Level) -> str:
    """Returns a digest of the sources and of the flags for `level`."""
    return _hash_of_sources(repr((_flags(), level.flags))).hexdigest()


def _command(level: Level, flags: Sequence[str] = ()) -> list[str]:
    compiler = next((found for name in COMPILERS if (found := shutil.which(name))), None)
    if compiler is None:
        raise NoCompilerError(f"no C++ compiler ({', '.join(COMPILERS)}) is installed")
    return [compiler, *_flags(), *level.flags, *flags]


def _check_flags(compiler: str, level: Level) -> None:
    """Raises CompilerError where the compiler does not know the level's flags, which takes it
    milliseconds to say; each start with an old one asks again."""
    _run([compiler, *level.flags, "-E", "-x", "c++", os.devnull])


def _flags() -> tuple[str, ...]:
    return (*FLAGS, *OPENMP.get(sys.platform, ("-fopenmp",)))


def _build_into(command: Sequence[str], path: Path) -> None:
    folder = Path(tempfile.mkdtemp(dir=path.parent))  # no object that a forked process deletes
    try:
        write_sealed(_compile(command, folder).read_bytes(), path, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(command: Sequence[str], folder: Path) -> Path:
    """Compiles with OpenMP but links without its runtime: once loaded, the library uses torch's."""
    objects, library = [folder / f"{unit.stem}.o" for unit in UNITS], folder / "kernels.so"
    compiling = [
        [*command, "-c", str(unit), "-o", str(built)]
        for unit, built in zip(UNITS, objects, strict=True)
    ]
    with ThreadPoolExecutor(num_cpus()) as pool:
        list(pool.map(_run, compiling))
    linking = [flag for flag in command[1:] if flag.startswith("-fsanitize")]
    linking += LINKING.get(sys.platform, ())
    _run([command[0], "-shared", *linking, *map(str, objects), "-o", str(library)])
    return library


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        raise CompilerError(f"{command[0]} failed: {done.stderr.strip()[-2000:]}")


def _digest(command: Sequence[str]) -> str:
    """Returns a digest of the sources, the flags and the compiler's file."""
    digest = _hash_of_sources(repr(command))
    stat = os.stat(command[0])
    digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()


def _hash_of_sources(first: str) -> hashlib.blake2b:
    digest = hashlib.blake2b(first.encode(), digest_size=12)
    for source in (path for folder in SOURCES for path in sorted(folder.iterdir())):
        digest.update(source.name.encode() + source.read_bytes())
    return digest
