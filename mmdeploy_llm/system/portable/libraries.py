"""Libraries that this process has loaded already, and memory that the C library keeps for later."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable


def c_library() -> ctypes.CDLL | None:
    """Returns the functions of the C library and of the system; None on Windows, whose programs
    have several."""
    return ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def loaded(path: str) -> ctypes.CDLL | None:
    """Returns a library if it is loaded; loads it where the system does not tell (Windows). None
    where it cannot be."""
    try:
        return ctypes.CDLL(path, getattr(os, "RTLD_NOLOAD", 0) | getattr(os, "RTLD_NOW", 0))
    except OSError:
        return None


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # as in <malloc.h>
MAX_KEPT_BLOCK = 32 * 2**20  # bytes; the upper limit of glibc
MAX_KEPT = 512 * 2**20  # bytes
FIRST_THRESHOLD = 128 * 2**10  # bytes; both thresholds of a new process


def keep_freed_memory() -> Callable[[], None]:
    """Makes the C library keep freed memory for later allocations, up to half a gigabyte, where it
    supports that (glibc): the next prefill needs results of the same sizes, and mapping their pages
    anew costs a tenth of its time. Settings in the environment stay as they are.

    Returns a function that gives the kept memory back and sets what glibc starts with. glibc cannot
    be asked for a program's own settings, nor to adapt them by itself again.
    """
    library = c_library()
    if library is None or not hasattr(library, "mallopt") or _is_malloc_tuned(library):
        return lambda: None
    library.mallopt(M_MMAP_THRESHOLD, MAX_KEPT_BLOCK)
    library.mallopt(M_TRIM_THRESHOLD, MAX_KEPT)

    def put_back() -> None:
        library.mallopt(M_MMAP_THRESHOLD, FIRST_THRESHOLD)
        library.mallopt(M_TRIM_THRESHOLD, FIRST_THRESHOLD)
        library.malloc_trim(0)

    return put_back


def _is_malloc_tuned(library: ctypes.CDLL) -> bool:
    """Whether the environment sets one of the thresholds."""
    library.getenv.restype = ctypes.c_char_p
    names = (b"MALLOC_MMAP_THRESHOLD_", b"MALLOC_TRIM_THRESHOLD_")
    tunables = library.getenv(b"GLIBC_TUNABLES") or b""
    return any(map(library.getenv, names)) or b"_threshold" in tunables
