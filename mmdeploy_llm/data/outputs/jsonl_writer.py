"""RecordWriter: appends records to the output of a batch, which it has locked and watches."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from mmdeploy_llm.data.records.files import (
    FileState,
    Folder,
    OutputLostError,
    OutputWriteError,
    is_at,
    open_regular,
)
from mmdeploy_llm.data.records.growing import GrowingFile, copy_range
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.outcome import NOTHING
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import lock
from mmdeploy_llm.system.portable import files

from .base import CountingWriter
from .recognise import save_foreign
from .scan import Kept, Mode, PlaceOf, check_target, exists_already, line_ends, scan

logger = logging.getLogger(__name__)

MAX_TRIES = 16  # the file may be replaced between opening and locking it


class RecordWriter(CountingWriter):
    """Writes records unbuffered, so that written records survive a killed process and only the
    last line can be torn.

    kept: what `scan` found, for mode "resume". Locks the file: a second run that writes to it
    raises ConfigError. Raises OutputLostError when the file no longer has its path, or somebody
    else changed it.
    """

    def __init__(self, path: Path, mode: Mode, kept: Kept | None = None) -> None:
        super().__init__(kept or Kept())
        check_target(path, mode)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._absolute = os.path.abspath(path)
        self._file = GrowingFile(_open_locked(path, mode), path)
        try:
            self._begin(mode)
        except BaseException:
            self._file.close()
            raise

    def _add(self, record: Record, item: Item | BadItem | None) -> int:
        """Appends one line; returns where it begins."""
        begin = self._file.size
        with self._writing():
            self._file.write(record.to_json().encode() + b"\n")
        self._file.commit()
        return begin

    def check(self) -> None:
        """Raises OutputLostError when the file has another name or size than this run gave it."""
        if not is_at(self._file.file, self._absolute):
            raise OutputLostError(self._words_of_loss())
        if not self._file.is_same_size:
            raise OutputLostError(self._file.words_of_change())

    def finish(self, place_of: PlaceOf) -> None:
        """Compares the file with what was written, waits until it is on the disk, and removes the
        earlier records of items that have a newer one. Called once, at the end."""
        self.check()
        self._file.check_content()
        with self._writing():
            if self.num_again:
                kept = scan(self._path, place_of, retried=NOTHING)
                self._replace(kept)
                self.index = kept.index
            os.fsync(self._file.file.fileno())

    def close(self) -> None:
        """Closes the file and releases its lock."""
        self._file.close()

    def _begin(self, mode: Mode) -> None:
        """Removes what must not stay in the file."""
        kept, status = self._kept, os.fstat(self._file.file.fileno())
        if mode != "resume":
            kept = Kept()
        # Without a state there was no file: one that has content is of another run.
        elif (FileState.of(status) != kept.state) if kept.state else status.st_size:
            raise ConfigError(
                f"another run wrote to {str(self._path)!r} meanwhile; start this one again"
            )
        else:
            save_foreign(self._file, kept.end)
        # A hard link, such as those of backups, keeps what the file had.
        if kept.drops or (status.st_nlink > 1 and status.st_size):
            self._replace(kept)
        else:
            self._file.keep(line_ends(self._file.file, kept.end))

    def _replace(self, kept: Kept) -> None:
        """Atomically replaces the file by a copy without `kept.drops`, locked as well."""
        partial = self._path.with_name(self._path.name + ".partial")
        with Folder.open(partial.parent) as folder:
            folder.remove(partial.name)  # what a killed run left, or somebody planted
        copy = open_regular(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND)
        try:
            lock(copy, partial)
            files.copy_rights(self._file.file.fileno(), copy.fileno())
            ends = [end for _, end in kept.drops]
            begins = [begin for begin, _ in kept.drops]
            for begin, end in zip([0, *ends], [*begins, kept.end], strict=True):
                copy_range(self._file.file, copy, begin, end)
            if not is_at(self._file.file, self._absolute):
                raise OutputLostError(self._words_of_loss())
            if not is_at(copy, partial):
                raise OutputLostError(
                    f"{str(partial)!r} was removed or replaced while it was written; find out by "
                    "whom, then start again with --resume"
                )
            os.fsync(copy.fileno())
            copy = self._renamed(copy, partial)
        except BaseException:
            is_left = not copy.closed and is_at(copy, partial)
            copy.close()
            if is_left:
                os.unlink(partial)  # a disk that is full
            raise
        self._file.close()
        self._file = GrowingFile(copy, self._path)
        self._file.keep(line_ends(copy))

    def _renamed(self, copy: FileIO, partial: Path) -> FileIO:
        """Gives the copy the name of the output; returns it, locked. Where no open file gets
        another name both are closed for it; another run that locks the output first is an error."""
        if files.CAN_RENAME_OPEN:
            os.replace(partial, self._path)
            return copy
        copy.close()
        self._file.close()
        os.replace(partial, self._path)
        return _open_locked(self._path, "resume")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Says what to do when the system takes no more; leaves no torn line then."""
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                self._file.roll_back()
            raise OutputWriteError(
                error.errno,
                f"{str(self._path)!r} cannot be written ({error.strerror or error}): make space, "
                "or whatever it lacks, then --resume does what is missing",
            ) from error

    def _words_of_loss(self) -> str:
        """Says what happened to the file, and where its records are. Saves them when no file has
        them any more."""
        begin = f"{str(self._path)!r} was removed or replaced while the run wrote to it; "
        place = self._file.place()
        if place is None:
            return begin + "its results could not be saved: no folder has the space for them"
        return (
            f"{begin}all its results are in {place!r}: rename that file to {str(self._path)!r}, "
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
