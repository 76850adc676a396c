"""GrowingFile: a file that one run extends, record by record, and what it has written to it;
GrowingPart: what formats of parts see of it."""

from __future__ import annotations

import errno
import logging
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Protocol
from zlib import crc32

from mmdeploy_llm.system.portable import files
from mmdeploy_llm.values.closing import Closing

from .files import OutputLostError, path_of, write_all

logger = logging.getLogger(__name__)

COPY_BYTES = 2**20


class GrowingPart(Protocol):
    """The file of a part that grows by pieces, a record each. file: open for reading and writing,
    unbuffered; it is written by the methods only."""

    @property
    def file(self) -> FileIO:
        """See the class."""

    @property
    def size(self) -> int:
        """Bytes of the whole pieces."""

    def __len__(self) -> int:
        """Returns the number of whole pieces."""

    def keep(self, ends: Iterable[int]) -> None:
        """Takes what is in the file as pieces that end at these places, and cuts off the rest."""

    def set_aside(self, begin: int) -> None:
        """Copies what follows a place, and is of somebody else, to a new file beside this one."""

    def write(self, data: bytes) -> None:
        """Adds bytes to the current piece."""

    def commit(self) -> int:
        """Ends the current piece; returns the size of all pieces."""

    def roll_back(self) -> None:
        """Removes the current piece."""


class GrowingFile(Closing):
    """Adds pieces, a record each, to the end of an open file, and keeps their ends and checksums:
    12 bytes for each. Nobody else may change the file: `is_same_size` notices at once what was cut
    off or added, `check_content` at the end whatever is not what was written.

    file: open for reading and writing, unbuffered. path: for messages.
    """

    def __init__(self, file: FileIO, path: Path) -> None:
        self.file, self.path = file, path
        self._folder = os.path.dirname(os.path.abspath(path))
        self._ends, self._sums = array("Q"), array("I")
        self._end = self._sum = 0  # of the piece that is being written

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def size(self) -> int:
        """Bytes of the whole pieces."""
        return self._ends[-1] if self._ends else 0

    @property
    def is_same_size(self) -> bool:
        """Whether the file has the bytes that were written, as far as its size says."""
        return os.fstat(self.file.fileno()).st_size == self._end

    def keep(self, ends: Iterable[int]) -> None:
        """Takes what is in the file as pieces that end at these places, and cuts off the rest."""
        for end in ends:
            self._sums.append(self._sum_of(self.size, end))
            self._ends.append(end)
        self.roll_back()

    def set_aside(self, begin: int) -> None:
        """Copies what follows a place, and is of somebody else, to a new file beside this one."""
        size = os.fstat(self.file.fileno()).st_size
        fd, path = self._new_file("rest", self._folder)
        with FileIO(fd, "wb") as copy:
            copy_range(self.file, copy, begin, size)
        words = "%r ended with %d bytes that are no record; they are in %r now"
        logger.warning(words, str(self.path), size - begin, path)

    def write(self, data: bytes) -> None:
        """Adds bytes to the current piece."""
        write_all(self.file, data)
        self._sum = crc32(data, self._sum)
        self._end += len(data)

    def commit(self) -> int:
        """Ends the current piece; returns the size of all pieces."""
        self._ends.append(self._end)
        self._sums.append(self._sum)
        self._sum = 0
        return self._end

    def roll_back(self) -> None:
        """Removes the current piece."""
        self._end, self._sum = self.size, 0
        self.file.truncate(self._end)
        self.file.seek(self._end)

    def check_content(self) -> None:
        """Compares all pieces with the file. Raises OutputLostError where they differ."""
        if not all(self._is_sound(*piece) for piece in self._pieces()):
            raise OutputLostError(self.words_of_change())

    def words_of_change(self) -> str:
        """Says what was done to the file and how to continue; copies the pieces that are whole to a
        new file when the file itself cannot be continued."""
        path, num = repr(str(self.path)), len(self)
        sound = [self._is_sound(*piece) for piece in self._pieces()]
        first = [*sound, False].index(False)  # of those that are damaged, if any
        begin, size = ([0, *self._ends])[first], os.fstat(self.file.fileno()).st_size
        if first == num:
            return (
                f"{size - begin} bytes that are not this run's follow its {num} results in {path}; "
                f"find out by whom, remove them (truncate -s {begin} {path}), then --resume "
                "continues"
            )
        if sum(sound) == first and size < self._ends[first]:
            rest = "the others are still there, and --resume" if first else "--resume"
            return (
                f"{path} was cut off while the run wrote to it: {num - first} of its {num} results "
                f"are gone; {rest} does them again"
            )
        begin_words = (
            f"{num - sum(sound)} of the {num} results in {path} are no longer what the run wrote; "
        )
        if not any(sound):
            return f"{begin_words}move it away, then --resume does them again"
        saved = self.saved()
        if saved is None:
            return begin_words + "the others could not be saved: no folder has the space for them"
        return (
            f"{begin_words}the others are in {saved!r}: move {path} away, rename that file to it, "
            "then --resume continues"
        )

    def saved(self) -> str | None:
        """Copies the pieces that are whole to a new file in the first folder that takes it: that of
        the file, the working folder, or the one for temporary files. Returns its path."""
        folders = (self._folder, os.getcwd(), tempfile.gettempdir())
        for folder in folders:
            try:
                fd, path = self._new_file("saved", folder)
            except OSError:
                continue
            try:
                with FileIO(fd, "wb") as copy:
                    for begin, end, total in self._pieces():
                        if self._is_sound(begin, end, total):
                            copy_range(self.file, copy, begin, end)
                return path
            except OSError:
                os.unlink(path)
        return None

    def _new_file(self, what: str, folder: str) -> tuple[int, str]:
        return tempfile.mkstemp(self.path.suffix, f"{self.path.name[:100]}.{what}-", folder)

    def place(self) -> str | None:
        """Returns the path that the file has now, or that of a copy; None when there is neither."""
        return path_of(self.file) or self.saved()

    def close(self) -> None:
        """Closes the file."""
        self.file.close()

    def _pieces(self) -> Iterator[tuple[int, int, int]]:
        begin = 0
        for end, total in zip(self._ends, self._sums, strict=True):
            yield begin, end, total
            begin = end

    def _is_sound(self, begin: int, end: int, total: int) -> bool:
        with suppress(OSError):
            return self._sum_of(begin, end) == total
        return False

    def _sum_of(self, begin: int, end: int) -> int:
        total = 0
        for piece in _read(self.file, begin, end):
            total = crc32(piece, total)
        return total


def copy_range(file: FileIO, copy: FileIO, begin: int, end: int) -> None:
    """Adds bytes of a file to another one."""
    for piece in _read(file, begin, end):
        write_all(copy, piece)


def _read(file: FileIO, begin: int, end: int) -> Iterator[bytes]:
    """Yields the bytes of a range. Raises OSError when the file is shorter."""
    while begin < end:
        piece = files.read_at(file.fileno(), min(end - begin, COPY_BYTES), begin)
        if not piece:
            raise OSError(errno.EIO, "the file is shorter than it was")
        yield piece
        begin += len(piece)
