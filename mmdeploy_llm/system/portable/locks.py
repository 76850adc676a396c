"""Locks of whole files against other processes."""

from __future__ import annotations

import errno
from typing import IO

PLACE = 2**40  # the byte that Windows locks, past the end of any file, which others may so read


def lock(file: IO[bytes]) -> None:
    """Locks a file until it is closed, without waiting. Raises BlockingIOError when another process
    has locked it, and OSError where its file system has no locks."""
    try:
        import fcntl
    except ImportError:
        _lock_byte(file)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_byte(file: IO[bytes]) -> None:
    """Locks a byte, as Windows does."""
    try:
        import msvcrt
    except ImportError:
        raise OSError(errno.ENOLCK, "this system has no locks of files") from None
    before = file.tell()
    file.seek(PLACE)
    try:
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    except OSError as error:
        raise BlockingIOError(error.errno, error.strerror) from None
    finally:
        file.seek(before)
