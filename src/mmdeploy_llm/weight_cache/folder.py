"""The folder of cached weights: whose files are used, how many stay."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from mmdeploy_llm.native.sealed import check_owner, check_status
from mmdeploy_llm.portable import files, locks
from mmdeploy_llm.read_ahead import KEPT_SUFFIX

SUFFIX, UNFINISHED = KEPT_SUFFIX, ".new"
UNUSABLE = ".unusable"  # an empty file in place of one that the model cannot be restored from
SUFFIXES = (SUFFIX, ".parsed", UNUSABLE, UNFINISHED)  # .parsed: see the room parse_cache
HARM = "whose weights would be used"
FREE_SHARE, FREE_BYTES = 20, 8 * 2**30  # a twentieth of the disk stays free, at most so much
MAX_AGE = 86400  # seconds after which an unfinished file is one that a killed process has left


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
    check_owner(path.parent, HARM)
    file = open(files.open_unfollowed(path, os.O_RDONLY), "rb")  # noqa: SIM115 - closed by callers
    try:
        found = os.fstat(file.fileno())
        check_status(path, found, HARM)
        with suppress(OSError):  # a folder that may only be read
            os.utime(path)
    except BaseException:
        file.close()
        raise
    return file, found.st_size


def make_folder(folder: Path, size: int, max_bytes: int) -> None:
    """Makes the folder for a file of `size` bytes. Raises NoRoomError, OSError, and ForeignError as
    `open_kept` does."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder, HARM)
    if size > max_bytes:
        raise NoRoomError(f"{size} bytes are more than the cache may have, {max_bytes}")
    disk = shutil.disk_usage(folder)
    if disk.free - size < min(FREE_BYTES, disk.total // FREE_SHARE):
        raise NoRoomError(f"the disk has {disk.free} bytes left, and {size} are needed")


def open_new(path: Path) -> IO[bytes] | None:
    """Opens the unfinished file that will become `path`; None while another process writes it. What
    a process that ended has left is written over."""
    new = path.with_suffix(UNFINISHED)
    file = open(files.open_unfollowed(new, os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115
    try:
        check_status(new, os.fstat(file.fileno()), HARM)
        locks.lock(file)
        if path.exists() or not os.path.samestat(os.fstat(file.fileno()), os.lstat(new)):
            raise BlockingIOError  # it has been finished meanwhile
        file.truncate()
    except (BlockingIOError, FileNotFoundError):
        file.close()
        return None
    except BaseException:
        file.close()
        raise
    return file


def finish(path: Path) -> None:
    """Gives a file that is whole its name."""
    path.with_suffix(UNFINISHED).replace(path)


def give_up(path: Path) -> None:
    """Puts an empty file in place of one that is whole and of no use, so that later starts neither
    read nor write it."""
    with suppress(OSError):
        os.close(files.open_unfollowed(path.with_suffix(UNUSABLE), os.O_WRONLY | os.O_CREAT, 0o600))
        path.unlink()


def discard(path: Path) -> None:
    """Removes what has been written of a file."""
    with suppress(OSError):
        path.with_suffix(UNFINISHED).unlink()


def make_room(kept: Path, max_bytes: int) -> list[Path]:
    """Removes what killed processes have left, and the files that were not used for longest until
    the others fit; never `kept`. Returns the removed ones. Processes that use one keep it until
    they end."""
    found = sorted(_files(kept.parent), key=lambda each: each[1].st_mtime_ns)
    total, removed = sum(each.st_size for _, each in found), []
    for path, each in found:
        if path.suffix == UNFINISHED:
            is_left = time.time() - each.st_mtime > MAX_AGE
        else:
            is_left = total > max_bytes and path.name != kept.name
        if is_left:
            with suppress(OSError):
                path.unlink()
                removed.append(path)
                total -= each.st_size
    return removed
