"""The folder of cached weights: whose files are used, how many stay."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mmdeploy_llm.kernels.cpu.sealed import check_owner, check_status
from mmdeploy_llm.system.portable import files
from mmdeploy_llm.weights.read_ahead import KEPT_SUFFIX

SUFFIX, UNFINISHED = KEPT_SUFFIX, ".new"
UNUSABLE = ".unusable"  # an empty file in place of one that the model cannot be restored from
SUFFIXES = (SUFFIX, ".parsed", UNUSABLE, UNFINISHED)  # .parsed: see the room parse_cache
HARM = "whose weights would be used"
FREE_SHARE, FREE_BYTES = 20, 8 * 2**30  # a twentieth of the disk stays free, at most so much
SMALL_SHARE = 100  # a file that takes a hundredth of what is left is kept all the same


class NoRoomError(Exception):
    """Raised where a file does not fit; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSize:
    """The files of a folder: how many, and their bytes."""

    num_files: int
    num_bytes: int


def folder_size(folder: Path) -> FolderSize:
    """Returns the size of a folder's files, unfinished ones too."""
    sizes = [found.st_size for _, found in _files(folder)]
    return FolderSize(num_files=len(sizes), num_bytes=sum(sizes))


def _files(folder: Path) -> list[tuple[Path, os.stat_result]]:
    found = []
    with suppress(OSError):
        for path in folder.iterdir():
            if path.suffix in SUFFIXES:
                with suppress(OSError):
                    found.append((path, path.lstat()))
    return found


def open_kept(path: Path) -> tuple[IO[bytes], int]:
    """Opens a file of the cache, and notes that it is used; also returns its size. Raises OSError,
    and ForeignError for a folder or a file that other users own or may write."""
    _check_folder(path.parent)
    try:
        file = open(path, "rb", opener=_opened)  # noqa: SIM115 - closed by callers
    except FileNotFoundError:
        raise
    except OSError as error:  # a link, a folder, rights
        raise OSError(error.errno, f"{error.strerror}; remove it", str(path)) from None
    try:
        found = os.fstat(file.fileno())
        check_status(path, found, HARM)
        with suppress(OSError):  # a folder that may only be read
            os.utime(path)
    except BaseException:
        file.close()
        raise
    return file, found.st_size


def _opened(path: str, flags: int) -> int:
    return files.open_unfollowed(path, flags)


def _check_folder(folder: Path) -> None:
    check_owner(folder, HARM)
    if not folder.is_dir():
        words = "Not a folder; remove it, or name another as weight_cache"
        raise NotADirectoryError(errno.ENOTDIR, words, str(folder))


def make_folder(folder: Path, size: int, max_bytes: int) -> None:
    """Makes the folder for a file of `size` bytes. Raises NoRoomError, OSError, and ForeignError as
    `open_kept` does."""
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_folder(folder)
    if size > max_bytes:
        raise NoRoomError(f"{size} bytes are more than the cache may have, {max_bytes}")
    disk = shutil.disk_usage(folder)
    free = min(FREE_BYTES, disk.total // FREE_SHARE)
    if disk.free - size < free and size > disk.free // SMALL_SHARE:
        left = f"the disk has {disk.free} bytes left, of which {free} stay free"
        raise NoRoomError(f"{left}, and {size} are needed")


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes] | None]:
    """Opens a file of this process alone, which gets the name `path` at the end, or is removed
    where anything is raised. Yields None where another process writes that file or has written it.
    Raises OSError where the file, or its folder, was removed meanwhile."""
    file = _open_new(path)
    if file is None:
        yield None
        return
    with closing(file):
        try:
            yield file
            file.flush()
            if not files.CAN_RENAME_OPEN:
                file.close()
            _rename(file.name, path)
        except BaseException:
            file.close()
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _open_new(path: Path) -> IO[bytes] | None:
    """Opens an unfinished file, locked; None while another process has one that will be `path`."""
    while not path.exists():
        others = path.parent.glob(f"{path.stem}-*{UNFINISHED}")
        if any([_is_written(other) for other in others]):
            return None
        fd, name = tempfile.mkstemp(UNFINISHED, f"{path.stem}-", path.parent)
        file = open(name, "r+b", opener=lambda *_, fd=fd: fd)  # noqa: SIM115 - closed by callers
        try:
            files.lock(file)
            if os.path.samestat(os.fstat(fd), os.lstat(name)):
                return file
        except (BlockingIOError, FileNotFoundError):  # it was taken for one that is left: again
            file.close()
        except BaseException:  # this file system has no locks
            file.close()
            os.unlink(name)
            raise
    return None


def _is_written(new: Path) -> bool:
    """Whether a process writes an unfinished file. Removes one that a killed process has left."""
    try:
        with open(files.open_unfollowed(new, os.O_RDWR), "r+b") as file:
            files.lock(file)
            if files.CAN_RENAME_OPEN:
                new.unlink()
        new.unlink(missing_ok=True)
    except BlockingIOError:
        return True
    except OSError:  # it is finished, or another's
        return False
    return False


def _rename(new: str, path: Path) -> None:
    try:
        os.replace(new, path)
    except FileNotFoundError:
        raise OSError(f"{new} was removed while it was written") from None
    except PermissionError:  # Windows replaces no file that is in use: another process was first
        if not path.is_file():
            raise
        os.unlink(new)


def give_up(path: Path) -> None:
    """Puts an empty file in place of one that is whole and of no use, so that later starts neither
    read nor write it."""
    with suppress(OSError):
        os.close(files.open_unfollowed(path.with_suffix(UNUSABLE), os.O_WRONLY | os.O_CREAT, 0o600))
        path.unlink()


def make_room(kept: Path, max_bytes: int) -> list[Path]:
    """Removes what killed processes have left, and the files that were not used for longest until
    the others fit; never `kept`. Returns the latter. Processes that use one keep it until they
    end."""
    found = sorted(_files(kept.parent), key=lambda each: each[1].st_mtime_ns)
    total, removed = sum(each.st_size for _, each in found), []
    for path, each in found:
        if path.suffix == UNFINISHED:
            total -= 0 if _is_written(path) else each.st_size
        elif total > max_bytes and path.name != kept.name:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # another process makes room as well
                removed.append(path)
                total -= each.st_size
    return removed
