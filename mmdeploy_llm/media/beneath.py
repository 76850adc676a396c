"""Opens files below a folder, so that no link leads out of it, even one that takes a folder's place
while the path is followed.

openat2 (Linux 5.6 and newer) follows the path and checks it in one step. Elsewhere the real path of
the opened descriptor is checked. Hard links and mounts below the folder count as inside.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from pathlib import Path

from mmdeploy_llm.system.portable import files
from mmdeploy_llm.system.portable.libraries import c_library

OPEN_FLAGS = os.O_RDONLY | files.NO_WAIT | files.NOFOLLOW  # links were resolved before
OPENAT2 = {"x86_64": 437, "aarch64": 437}  # machine -> number of the system call on Linux
RESOLVE_NO_MAGICLINKS, RESOLVE_BENEATH = 0x02, 0x08
MAX_TRIES = 16  # the kernel asks to try again when something on the path was renamed meanwhile
# Kernels before 5.6 answer ENOSYS, some containers' filters of system calls EPERM.
IS_MISSING = (errno.ENOSYS, errno.EPERM)


class _OpenHow(ctypes.Structure):
    """The kernel's struct open_how."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("resolve", ctypes.c_uint64),
    )


def open_beneath(root: Path, path: Path) -> int:
    """Opens `path`, relative to the folder `root`, for reading; returns its descriptor.

    Raises OSError: EXDEV when the path leads out of `root`, ENOTSUP when this system has no way to
    tell.
    """
    if not files.FOLDER:  # Windows has no descriptors of folders
        return _checked(os.open(root / path, OPEN_FLAGS), root)
    folder = os.open(root, files.FOLDER_PATH)
    try:
        fd = _by_openat2(folder, path)
        return _by_real_path(folder, path) if fd is None else fd
    finally:
        os.close(folder)


def _by_openat2(folder: int, path: Path) -> int | None:
    """Opens by openat2; returns None where the kernel does not have it."""
    number = OPENAT2.get(platform.machine()) if sys.platform == "linux" else None
    if number is None:
        return None
    how = _OpenHow(OPEN_FLAGS, 0, RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS)
    for _ in range(MAX_TRIES):
        fd, code = _openat2(number, folder, os.fsencode(path), how)
        if fd >= 0:
            return fd
        if code in IS_MISSING:
            return None
        if code not in (errno.EAGAIN, errno.EINTR):
            break
    raise OSError(code, os.strerror(code))


def _openat2(number: int, folder: int, path: bytes, how: _OpenHow) -> tuple[int, int]:
    """Makes the system call once; returns the descriptor, -1 if none, and errno."""
    libc = c_library()
    if libc is None:
        return -1, errno.ENOSYS
    libc.syscall.restype = ctypes.c_long
    fd = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_int(folder),
        ctypes.c_char_p(path),
        ctypes.byref(how),
        ctypes.c_size_t(ctypes.sizeof(how)),
    )
    return fd, ctypes.get_errno()


def _by_real_path(folder: int, path: Path) -> int:
    """Opens the file, then compares its real path with the folder's."""
    return _checked(os.open(path, OPEN_FLAGS, dir_fd=folder), files.real_path(folder))


def _checked(fd: int, top: Path | None) -> int:
    """Returns the descriptor if its file lies below the folder `top`, without links; else closes
    it."""
    try:
        found = files.real_path(fd)
        if found is None or top is None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        if not found.is_relative_to(top):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
    except BaseException:
        os.close(fd)
        raise
    return fd
