"""Opens the files that a batch writes. Whoever can write to their folder may put a link, a FIFO or
another file in their place: none of these is followed, waited for or overwritten."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable import files
from mmdeploy_llm.system.portable.folders import OpenFolder, open_folder
from mmdeploy_llm.values.closing import Closing

KINDS = (
    (stat.S_ISLNK, "a link; name the file that it leads to"),
    (stat.S_ISDIR, "a folder; name a file"),
    (stat.S_ISFIFO, "a FIFO, not a regular file; name another file"),
    (stat.S_ISREG, "another file now"),
)
OTHER_KIND = "a device or a socket, not a regular file; name another file"


FULL = (errno.ENOSPC, errno.EFBIG, errno.EIO, getattr(errno, "EDQUOT", errno.ENOSPC))


class OutputLostError(ConfigError):
    """Somebody else removed, replaced or changed a file while a batch wrote to it."""


class OutputWriteError(OSError):
    """The system took no more of an output, or of what is written beside it; the message of a
    batch says where its results are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileState:
    """The identity of a file and of its content, as far as the file system knows it."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        """Returns the state in the result of a stat call."""
        return cls(
            device=status.st_dev,
            inode=status.st_ino,
            size=status.st_size,
            mtime_ns=status.st_mtime_ns,
        )


def check_regular(path: Path) -> bool:
    """Returns whether the file exists. Raises ConfigError when it is not a regular file; a link to
    one is refused too."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISREG(status.st_mode):
        raise _irregular(path, status)
    return True


def open_regular(path: Path, flags: int) -> FileIO:
    """Opens a regular file unbuffered. Raises ConfigError for anything else at `path`, links
    included, and OSError as os.open does.

    flags: of os.open; with O_CREAT a missing file is made.
    """
    check_regular(path)  # before it is opened: a device may react to that
    try:
        fd = files.open_unfollowed(path, flags)
    except OSError:
        check_regular(path)  # what has taken the path meanwhile
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise _irregular(path, status)
    access = flags & files.ACCESS
    return FileIO(fd, "rb" if access == os.O_RDONLY else "ab+" if access == os.O_RDWR else "ab")


def is_at(file: IO[bytes] | FileIO, path: str | Path) -> bool:
    """Returns whether `path` names the open file itself."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file.fileno()))
    except OSError:
        return False


class Folder(Closing):
    """An open folder. Names in it are used without following links, whatever happens to its path.

    path: for messages, and to notice that the folder was replaced, whatever the working folder is
    then.
    """

    def __init__(self, opened: OpenFolder, path: Path) -> None:
        self._opened = opened
        self.path = path
        self._absolute = os.path.abspath(path)

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Opens a folder that the caller named, links included; makes it when it is missing."""
        path.mkdir(parents=True, exist_ok=True)
        return cls(open_folder(path), path)

    def inner(self, name: str) -> Folder:
        """Opens a folder in this one; makes it when it is missing. Raises ConfigError for a link or
        a file of this name."""
        with suppress(FileExistsError):
            self._opened.make_folder(name)
        found = self.existing(name)
        if found is None:
            raise ConfigError(
                f"{str(self.path / name)!r} is not a folder, and links are not followed; remove it "
                "or name another file"
            )
        return found

    def existing(self, name: str) -> Folder | None:
        """Opens a folder in this one; None when there is none, or something else has the name."""
        try:
            return Folder(self._opened.open_folder(name), self.path / name)
        except OSError:
            return None

    def names(self) -> list[str]:
        """Returns the names of the regular files and folders in it, sorted."""
        return sorted(name for name in self._opened.names() if not self._is_link(name))

    def _is_link(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            return stat.S_ISLNK(self._status(name).st_mode)
        return False

    def all_names(self) -> list[str]:
        """Returns all names in it, those of links too."""
        return self._opened.names()

    def states(self) -> dict[str, FileState]:
        """Returns the states of the regular files in it, by name; links are left out."""
        found = {}
        for name in self.names():
            with suppress(FileNotFoundError):
                status = self._status(name)
                if stat.S_ISREG(status.st_mode):
                    found[name] = FileState.of(status)
        return found

    def open_file(self, name: str, flags: int) -> FileIO:
        """Opens a regular file in it unbuffered; with os.O_CREAT a missing one is made. Raises
        ConfigError for anything else of this name, links included."""
        try:
            fd = self._opened.open(name, flags)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                raise _irregular(self.path / name, self._status(name)) from None
            raise self._named(error, name) from None
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise _irregular(self.path / name, self._status(name))
        access = flags & files.ACCESS
        return FileIO(fd, "rb" if access == os.O_RDONLY else "rb+")

    def replace(self, name: str, other: str) -> None:
        """Gives a file another name; what has that name is replaced, a link itself."""
        self._opened.rename(name, other)

    def sync(self) -> None:
        """Waits until the names in it are on the disk."""
        self._opened.sync()

    def has(self, file: IO[bytes] | FileIO, name: str) -> bool:
        """Returns whether the name is that of this open file."""
        return self._is(name, os.fstat(file.fileno()))

    def _is(self, name: str, status: os.stat_result) -> bool:
        try:
            return os.path.samestat(self._status(name), status)
        except OSError:
            return False

    def _named(self, error: OSError, name: str) -> OSError:
        """Returns the error with the path of a file: the system knows its name only."""
        kind = OutputWriteError if error.errno in FULL else OSError
        return kind(error.errno, error.strerror, str(self.path / name))

    def _status(self, name: str) -> os.stat_result:
        return self._opened.status(name)

    def remove(self, name: str) -> None:
        """Removes a file, or a link but not what it leads to."""
        try:
            self._opened.remove(name)
        except FileNotFoundError:
            pass
        except (IsADirectoryError, PermissionError):
            if stat.S_ISDIR(self._status(name).st_mode):
                raise ConfigError(f"{str(self.path / name)!r} is a folder; remove it") from None
            raise

    def remove_folder(self, name: str) -> None:
        """Removes an empty folder in it. Raises OSError for one that is not."""
        self._opened.remove_folder(name)

    def check(self, name: str) -> None:
        """Raises ConfigError when the name is that of a link, a FIFO, a device or a folder."""
        try:
            status = self._status(name)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode):
            raise _irregular(self.path / name, status)

    def write(
        self,
        name: str,
        pieces: Iterable[bytes],
        partial: str | None = None,
        *,
        is_synced: bool = True,
    ) -> None:
        """Writes a whole file: the name has the new content, or what it had before.

        partial: name of the file until it is complete. is_synced: waits until its content is on the
        disk. Raises ConfigError as `check` does, and OutputLostError when the file was removed or
        replaced meanwhile.
        """
        partial = partial or f"{name}.partial"
        self.check(name)
        self.remove(partial)  # what a killed process left, or somebody planted
        try:
            fd = self._opened.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        except OSError as error:
            raise self._named(error, partial) from None
        with open(fd, "wb") as file:
            begun = os.fstat(fd)
            try:
                for piece in pieces:  # whose own errors are about what they are read from
                    with self._naming(name):
                        file.write(piece)
                with self._naming(name):
                    file.flush()
                    if is_synced:
                        os.fsync(fd)
                self._check_there(file, partial)
                with self._naming(name):
                    file.close()  # Windows renames no open file
                self.check(name)
                self.replace(partial, name)
            except BaseException:
                with suppress(OSError):  # it writes what is left, which a full disk refuses again
                    file.close()
                if self._is(partial, begun):
                    self.remove(partial)
                raise

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno is None:  # it has words of its own
                raise
            raise self._named(error, name) from None

    def _check_there(self, file: IO[bytes], partial: str) -> None:
        if not self.has(file, partial):
            raise OutputLostError(
                f"{str(self.path / partial)!r} was removed or replaced while it was written; "
                "find out by whom, then write it again"
            )

    @property
    def is_in_place(self) -> bool:
        """Whether its path still names this folder, and no other."""
        try:
            return os.path.samestat(os.stat(self._absolute), self._opened.own_status())
        except OSError:
            return False

    @property
    def place(self) -> str | None:
        """The path that the folder has now; None when it has none, or none that is known."""
        return self._opened.place()

    def check_in_place(self) -> None:
        """Raises OutputLostError when another folder, or none, has this one's path now."""
        if not self.is_in_place:
            raise OutputLostError(
                f"the folder {str(self.path)!r} was removed or replaced while files were written "
                "to it; find out by whom, then write them again"
            )

    def close(self) -> None:
        """Closes the descriptor."""
        self._opened.close()


def write_all(file: FileIO, data: bytes) -> None:
    """Writes all bytes to an unbuffered file, which may take some of them only."""
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]


def path_of(file: FileIO) -> str | None:
    """Returns the path that an open file has now; None when it has none, or none that is known."""
    found = files.real_path(file.fileno())
    return str(found) if found is not None and is_at(file, found) else None


def _irregular(path: Path, status: os.stat_result) -> ConfigError:
    kind = next((words for test, words in KINDS if test(status.st_mode)), OTHER_KIND)
    return ConfigError(f"{str(path)!r} is {kind}")
