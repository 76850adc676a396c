"""Libraries that this process has loaded already."""

from __future__ import annotations

import ctypes
import os


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
