"""Opening, reading, syncing and locking files by their descriptors."""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

# 0 where a system has no such flag. Without BINARY, Windows changes the ends of lines.
BINARY = getattr(os, "O_BINARY", 0)
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
ACCESS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR  # the bits of flags that say which of them
CAN_RENAME_OPEN = os.name == "posix"  # Windows gives no open file another name
# Opening a FIFO must not wait for its other end, a terminal must not become ours, and no program
# that is started later keeps the file open.
NO_WAIT = (
    getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_CLOEXEC", getattr(os, "O_NOINHERIT", 0))
    | BINARY
)
# O_PATH asks for no right to list the folder; only Linux has it.
FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
FOLDER_PATH = FOLDER | getattr(os, "O_PATH", os.O_RDONLY)

_SEEKING = threading.Lock()


def open_unfollowed(path: str | Path, flags: int, mode: int = 0o666, **at: int) -> int:
    """Opens a file, but no link: that raises OSError (ELOOP). Neither waits for a FIFO nor takes a
    terminal. at: dir_fd, the descriptor of the folder that `path` is relative to.

    Where the system cannot refuse a link itself, the open file is compared with the path: a link
    that takes its place meanwhile is refused as well, but with O_CREAT may have made a file.
    """
    fd = os.open(path, flags | NO_WAIT | NOFOLLOW, mode, **at)
    if not NOFOLLOW:
        try:
            if not os.path.samestat(os.lstat(path), os.fstat(fd)):
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        except BaseException:
            os.close(fd)
            raise
    return fd


def read_at(fd: int, size: int, offset: int) -> bytes:
    """Returns up to `size` bytes at an offset, and leaves the file's position alone."""
    if hasattr(os, "pread"):
        return os.pread(fd, size, offset)
    with _SEEKING, _Position(fd, offset):
        return os.read(fd, size)


def read_into(fd: int, view: memoryview, offset: int) -> int:
    """Reads bytes at an offset into `view`; returns how many, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    data = read_at(fd, min(len(view), 2**24), offset)
    view[: len(data)] = data
    return len(data)


def reserve(fd: int, size: int) -> None:
    """Gives a file of ours `size` bytes, and room for them on the disk where the system can: a page
    of a mapped file that finds none when it is written ends the process. Raises OSError."""
    os.ftruncate(fd, size)  # Windows gives it room with that
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # others say that the file system cannot reserve room
    elif hasattr(os, "pwrite"):  # macOS gives room to what is written
        zeros, done = memoryview(bytes(min(size, 2**22))), 0
        while done < size:
            done += os.pwrite(fd, zeros[: size - done], done)


class _Position:
    """Another position in a file, for a moment."""

    def __init__(self, fd: int, offset: int) -> None:
        self._fd, self._offset = fd, offset

    def __enter__(self) -> None:
        self._before = os.lseek(self._fd, 0, os.SEEK_CUR)
        os.lseek(self._fd, self._offset, os.SEEK_SET)

    def __exit__(self, *_: object) -> None:
        os.lseek(self._fd, self._before, os.SEEK_SET)


def sync(fd: int) -> None:
    """Waits until the content is on the disk. Windows can do that only for files that it writes."""
    try:
        os.fsync(fd)
    except OSError as error:
        if os.name == "posix" or error.errno != errno.EBADF:
            raise


def wait_for_writes(fd: int) -> None:
    """Makes writes to a file that was opened with NO_WAIT wait for their end."""
    if hasattr(os, "set_blocking"):
        os.set_blocking(fd, True)


def make_fifo(path: Path) -> None:
    """Makes a FIFO, which nobody may wait for; nothing where the system has none (Windows)."""
    if hasattr(os, "mkfifo"):
        os.mkfifo(path)


def make_readable(fd: int) -> None:
    """Lets everybody read a file and only its owner write it. On Windows a file has the rights of
    its folder."""
    if hasattr(os, "fchmod"):
        os.fchmod(fd, 0o644)


def copy_rights(fd: int, copy: int) -> None:
    """Gives a copy the mode and, as far as the system lets us, the owner of a file."""
    status = os.fstat(fd)
    if hasattr(os, "fchmod"):
        os.fchmod(copy, stat.S_IMODE(status.st_mode))
    if hasattr(os, "fchown"):
        try:
            os.fchown(copy, status.st_uid, status.st_gid)
        except OSError:
            return


def own_user() -> int | None:
    """Returns the number of the user whose rights this process has; None where files do not tell
    their owners by numbers (Windows)."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def is_same_file(first: str | Path, second: str | Path) -> bool:
    """Whether two names lead to one file or folder: links, mounts and letters of another case
    count."""
    with suppress(OSError):
        return os.path.samefile(first, second)
    return os.path.realpath(first) == os.path.realpath(second)


def real_path(fd: int) -> Path | None:
    """Returns the path that an open file or folder has now, without links; None where the system
    does not tell it."""
    try:
        if sys.platform == "win32":
            return _path_on_windows(fd)
        import fcntl

        if hasattr(fcntl, "F_GETPATH"):  # macOS
            found = fcntl.fcntl(fd, fcntl.F_GETPATH, bytes(1024))
            return Path(os.fsdecode(found.rstrip(b"\0")))
        return Path(os.readlink(f"/proc/self/fd/{fd}"))
    except (OSError, AttributeError, ImportError):
        return None


def _path_on_windows(fd: int) -> Path | None:
    """Asks GetFinalPathNameByHandleW."""
    import ctypes
    import msvcrt

    kernel: object = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    ask = kernel.GetFinalPathNameByHandleW  # type: ignore[attr-defined]
    ask.argtypes = (ctypes.c_void_p, ctypes.c_wchar_p, ctypes.c_uint32, ctypes.c_uint32)
    found = ctypes.create_unicode_buffer(2**15)
    handle = msvcrt.get_osfhandle(fd)  # type: ignore[attr-defined,unused-ignore]
    size = ask(handle, found, len(found), 0)
    return Path(found.value.removeprefix("\\\\?\\")) if 0 < size < len(found) else None


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
