"""RecordWriter: appends records to the output of a batch, which it has locked and watches."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import tempfile
from io import FileIO
from pathlib import Path

from mmdeploy_llm.datasets.rows import BadItem
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.records.closing import Closing
from mmdeploy_llm.records.files import (
    FileState,
    Folder,
    OutputLostError,
    is_at,
    open_regular,
    write_all,
)
from mmdeploy_llm.records.item import Item
from mmdeploy_llm.records.record import Record

from .scan import Kept, Mode, PlaceOf, check_target, exists_already, scan

logger = logging.getLogger(__name__)

COPY_BYTES = 2**20
MAX_TRIES = 16  # the file may be replaced between opening and locking it


class RecordWriter(Closing):
    """Writes records unbuffered, so that written records survive a killed process and only the
    last line can be torn.

    kept: what `scan` found, for mode "resume". Locks the file: a second run that writes to it
    raises ConfigError. Raises OutputLostError when the file no longer has its path. Not
    thread-safe.

    num_again: records of items that had one before.
    """

    def __init__(self, path: Path, mode: Mode, kept: Kept | None = None) -> None:
        check_target(path, mode)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._absolute = os.path.abspath(path)
        self._kept = kept or Kept()
        self.index = self._kept.index
        self.num_again = 0
        self._file = _open_locked(path, mode)
        try:
            self._offset = self._begin(mode)
        except BaseException:
            self._file.close()
            raise

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Appends one line; returns whether it is the first of its item.

        place: rank of the item in the input order, if it has one. item: for formats that store
        more than the record.
        """
        line = record.to_json().encode() + b"\n"
        begin = self._offset
        write_all(self._file, line)
        self._offset += len(line)
        is_first = record.key not in self._kept.done
        if not is_first:
            self.num_again += 1
        elif place is not None:
            self.index.add(record, place, begin)
        self._check()
        return is_first

    def finish(self, place_of: PlaceOf) -> None:
        """Removes the earlier records of items that have a newer one. Called once, at the end."""
        self._check()
        if self.num_again:
            kept = scan(self._path, place_of, is_failed_redone=False)
            self._replace(kept)
            self.index = kept.index

    def close(self) -> None:
        """Closes the file and releases its lock."""
        self._file.close()

    def _begin(self, mode: Mode) -> int:
        """Removes what must not stay in the file and returns its size."""
        kept = self._kept
        if mode != "resume":
            self._file.truncate(0)
            return 0
        status = os.fstat(self._file.fileno())
        # Without a state there was no file: one that has content is of another run.
        is_same = FileState.of(status) == kept.state if kept.state else status.st_size == 0
        if not is_same:
            raise ConfigError(
                f"another run wrote to {str(self._path)!r} meanwhile; start this one again"
            )
        if not kept.drops:
            self._file.truncate(kept.end)
            return kept.end
        return self._replace(kept)

    def _replace(self, kept: Kept) -> int:
        """Atomically replaces the file by a copy without `kept.drops`, locked as well; returns its
        size."""
        partial = self._path.with_name(self._path.name + ".partial")
        with Folder.open(partial.parent) as folder:
            folder.remove(partial.name)  # what a killed run left, or somebody planted
        copy = open_regular(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            lock(copy, partial)
            os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
            ends = [end for _, end in kept.drops]
            begins = [begin for begin, _ in kept.drops]
            for begin, end in zip([0, *ends], [*begins, kept.end], strict=True):
                _copy(self._file, copy, begin, end)
            self._check()
            if not is_at(copy, partial):
                raise OutputLostError(
                    f"{str(partial)!r} was removed or replaced while it was written; find out by "
                    "whom, then start again with --resume"
                )
            os.replace(partial, self._path)
        except BaseException:
            copy.close()
            raise
        self._file.close()
        self._file = copy
        return os.fstat(copy.fileno()).st_size

    def _check(self) -> None:
        if not is_at(self._file, self._absolute):
            raise OutputLostError(self._words_of_loss())

    def _words_of_loss(self) -> str:
        """Says what happened to the file, and where its records are. Saves them when no file has
        them any more."""
        begin = f"{str(self._path)!r} was removed or replaced while the run wrote to it; "
        moved = _path_of(self._file)
        if moved is None:
            folders = (os.path.dirname(self._absolute), os.getcwd(), tempfile.gettempdir())
            moved = _saved(self._file, folders, self._path.name)
        if moved is None:
            return begin + "its results could not be saved: no folder has the space for them"
        return (
            f"{begin}all its results are in {moved!r}: rename that file to {str(self._path)!r}, "
            "then --resume continues"
        )


def _open_locked(path: Path, mode: Mode) -> FileIO:
    """Opens the file and locks it against other processes until it is closed."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if mode == "new" else 0)
    for _ in range(MAX_TRIES):
        try:
            file = open_regular(path, flags)
        except FileExistsError:
            raise ConfigError(exists_already(path)) from None
        try:
            lock(file, path)
        except BaseException:
            file.close()
            raise
        if is_at(file, path):
            return file
        file.close()  # another file took its place before it was locked
    raise ConfigError(f"{str(path)!r} is replaced again and again; give another --output")


def lock(file: FileIO, path: Path) -> None:
    """Locks a file of an output against other runs. Raises ConfigError when one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"another run is writing to {str(path)!r}; wait for its end, or give another --output"
        ) from None
    except OSError as error:  # some network file systems have no locks
        logger.warning(
            "%r cannot be locked (%s): make sure that no other run writes to it",
            str(path),
            error.strerror,
        )


def _path_of(file: FileIO) -> str | None:
    """Returns the path that an open file has now; None when it has none, or none that is known."""
    try:
        found = os.readlink(f"/proc/self/fd/{file.fileno()}")
    except OSError:
        return None
    return found if is_at(file, found) else None


def _saved(file: FileIO, folders: tuple[str, ...], name: str) -> str | None:
    """Copies an open file to a new one in the first folder that takes it. Returns its path."""
    size = os.fstat(file.fileno()).st_size
    for folder in folders:
        try:
            fd, path = tempfile.mkstemp(".jsonl", f"{name[:100]}.saved-", folder)
        except OSError:
            continue
        try:
            with FileIO(fd, "wb") as copy:
                _copy(file, copy, 0, size)
            return path
        except OSError:
            os.unlink(path)
    return None


def _copy(file: FileIO, copy: FileIO, begin: int, end: int) -> None:
    while begin < end:
        piece = os.pread(file.fileno(), min(end - begin, COPY_BYTES), begin)
        if not piece:
            raise OSError(errno.EIO, "the file is shorter than it was")
        write_all(copy, piece)
        begin += len(piece)
