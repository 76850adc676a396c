"""Folders that are used without their path, so that whoever renames or replaces one of the folders
above, or puts a link in the place of one, leads nobody elsewhere."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Protocol

from .files import FOLDER, NOFOLLOW, open_unfollowed, real_path


class OpenFolder(Protocol):
    """An open folder; `name` is that of something in it, which is never followed when it is a
    link."""

    def open(self, name: str, flags: int, mode: int = 0o666) -> int: ...
    def open_folder(self, name: str) -> OpenFolder: ...
    def make_folder(self, name: str) -> None: ...
    def status(self, name: str) -> os.stat_result: ...
    def own_status(self) -> os.stat_result: ...
    def names(self) -> list[str]: ...
    def rename(self, name: str, other: str) -> None: ...
    def remove(self, name: str) -> None: ...
    def remove_folder(self, name: str) -> None: ...
    def place(self) -> str | None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


def open_folder(path: Path) -> OpenFolder:
    """Opens a folder that the caller named, links included."""
    if _has_descriptors():
        return _ByDescriptor(os.open(path, os.O_RDONLY | FOLDER))
    return _ByPath(path.resolve(strict=True))


def _has_descriptors() -> bool:
    """Whether this system opens folders, and files by the descriptor of their folder. Windows does
    not."""
    return os.open in os.supports_dir_fd and hasattr(os, "O_DIRECTORY")


class _ByDescriptor:
    """A folder that the system keeps open."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        return open_unfollowed(name, flags, mode, dir_fd=self._fd)

    def open_folder(self, name: str) -> _ByDescriptor:
        fd = os.open(name, os.O_RDONLY | FOLDER | NOFOLLOW, dir_fd=self._fd)
        return _ByDescriptor(fd)

    def make_folder(self, name: str) -> None:
        os.mkdir(name, dir_fd=self._fd)

    def status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def own_status(self) -> os.stat_result:
        return os.fstat(self._fd)

    def names(self) -> list[str]:
        return os.listdir(self._fd)

    def rename(self, name: str, other: str) -> None:
        os.rename(name, other, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def remove(self, name: str) -> None:
        os.unlink(name, dir_fd=self._fd)

    def remove_folder(self, name: str) -> None:
        os.rmdir(name, dir_fd=self._fd)

    def place(self) -> str | None:
        """Returns the path that the folder has now; None when it has none, or none that is
        known."""
        found = real_path(self._fd)
        try:
            is_there = found is not None and os.path.samestat(os.lstat(found), os.fstat(self._fd))
        except OSError:
            return None
        return str(found) if is_there else None

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class _ByPath:
    """A folder whose path is looked at before each use: another folder or a link that has its place
    then raises OSError. One that takes its place in the same moment is not noticed."""

    def __init__(self, path: Path) -> None:
        self._path, self._begun = path, os.lstat(path)
        self._check_kind(self._begun)

    def open(self, name: str, flags: int, mode: int = 0o666) -> int:
        return open_unfollowed(self._at(name), flags, mode)

    def open_folder(self, name: str) -> _ByPath:
        return _ByPath(self._at(name))

    def make_folder(self, name: str) -> None:
        self._at(name).mkdir()

    def status(self, name: str) -> os.stat_result:
        return os.lstat(self._at(name))

    def own_status(self) -> os.stat_result:
        return self._begun

    def names(self) -> list[str]:
        return os.listdir(self._here())

    def rename(self, name: str, other: str) -> None:
        os.replace(self._at(name), self._at(other))

    def remove(self, name: str) -> None:
        os.unlink(self._at(name))

    def remove_folder(self, name: str) -> None:
        os.rmdir(self._at(name))

    def place(self) -> str | None:
        try:
            return str(self._here())
        except OSError:
            return None

    def sync(self) -> None:
        """Does nothing: such systems write names by themselves."""

    def close(self) -> None:
        """Does nothing: nothing is open."""

    def _at(self, name: str) -> Path:
        if Path(name).name != name:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), name)
        return self._here() / name

    def _here(self) -> Path:
        found = os.lstat(self._path)
        self._check_kind(found)
        if not os.path.samestat(found, self._begun):
            raise OSError(errno.ENOTDIR, "another folder has this path now", str(self._path))
        return self._path

    def _check_kind(self, status: os.stat_result) -> None:
        if not stat.S_ISDIR(status.st_mode):
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(self._path))
