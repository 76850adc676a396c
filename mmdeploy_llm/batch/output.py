"""The JSONL output: gains a line as each item finishes, and an interrupted run can be resumed.

new        the file must not exist
overwrite  an existing file is emptied once the run is ready to write
resume     good lines stay; those of items to be retried and a torn last line are removed
"""

from __future__ import annotations

import fcntl
import logging
import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from mmdeploy_llm.errors import ConfigError

from .ids import IdSet
from .records import Record

logger = logging.getLogger(__name__)

Mode = Literal["new", "overwrite", "resume"]
PlaceOf = Callable[[Record], int | None]
COPY_BYTES = 2**20


class RecordIndex:
    """Positions of a job's records in its output, and their counts: 17 bytes per record.

    Filled by `scan`, then by RecordWriter.
    """

    def __init__(self) -> None:
        self._places = array("q")
        self._offsets = array("Q")
        self._failed = bytearray()
        self.failures: Counter[str] = Counter()
        self.num_output_tokens = 0
        self.num_media_tokens = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_failed(self) -> int:
        """Records of failed items."""
        return self.failures.total()

    def add(self, record: Record, place: int, offset: int) -> None:
        """Adds a record that begins at byte `offset`; `place` is its rank in the input order."""
        self._places.append(place)
        self._offsets.append(offset)
        self._failed.append(not record.is_ok)
        if not record.is_ok:
            self.failures[record.failure] += 1
        self.num_output_tokens += record.num_output_tokens
        self.num_media_tokens += record.num_image_tokens + record.num_video_tokens

    def offsets(self, most: int | None = None) -> list[int]:
        """Returns byte offsets in input order; at most `most`, failed records chosen first."""
        order = sorted(range(len(self)), key=self._places.__getitem__)
        if most is not None and len(order) > most:
            order.sort(key=lambda number: not self._failed[number])
            order = sorted(order[:most], key=self._places.__getitem__)
        return [self._offsets[number] for number in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The state of an output file when a run begins.

    done: keys of the items that are not retried.
    drops: byte ranges (begin, end) to remove.
    size: size of the file in bytes.
    end: offset at which its last complete line ends.
    """

    done: IdSet = field(default_factory=IdSet)
    index: RecordIndex = field(default_factory=RecordIndex)
    drops: tuple[tuple[int, int], ...] = ()
    size: int = 0
    end: int = 0


def check_target(path: Path, mode: Mode) -> None:
    """Raises ConfigError when `path` cannot be written in this mode; changes nothing."""
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; name a file to write")
    if mode == "new" and path.exists():
        raise ConfigError(
            f"{str(path)!r} exists already; --resume does what is left, --overwrite starts again, "
            "--output writes elsewhere (in Python: resume=True, overwrite=True or another output)"
        )


def scan(path: Path, place_of: PlaceOf, *, is_failed_redone: bool = True) -> Kept:
    """Reads an existing output once, line by line, without changing it.

    Marks for removal a last line without a line break, torn by an interruption, and the failures
    of this input's items that are to be retried. Raises ConfigError for a line that is no record.
    """
    done, index = IdSet(), RecordIndex()
    drops: list[tuple[int, int]] = []
    begin = num_dropped = 0
    for number, line in enumerate(_whole_lines(path), 1):
        record = _parsed(line, path, number)
        place = place_of(record)
        is_left = not record.is_ok and is_failed_redone
        # A second record of the same item is removed too.
        if (is_left and place is not None) or (not is_left and not done.add(record.key)):
            drops.append((begin, begin + len(line)))
            num_dropped += len(line)
        elif place is not None:
            index.add(record, place, begin - num_dropped)
        begin += len(line)
    size = path.stat().st_size if path.exists() else 0
    return Kept(done=done, index=index, drops=tuple(drops), size=size, end=begin)


def read_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file, none when it does not exist; skips a torn last line.

    Raises ConfigError for a line that is no record.
    """
    for number, line in enumerate(_whole_lines(path), 1):
        yield _parsed(line, path, number)


def records_at(path: Path, offsets: list[int]) -> Iterator[Record]:
    """Yields the records that begin at these byte offsets, in the order of the offsets."""
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            yield Record.from_json(file.readline())


def _whole_lines(path: Path) -> Iterator[bytes]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line


def _parsed(line: bytes, path: Path, number: int) -> Record:
    try:
        return Record.from_json(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"line {number} of {str(path)!r} is not a record of a batch ({error}); name another "
            "file with --output, or --overwrite this one"
        ) from None


class RecordWriter:
    """Writes records unbuffered, so that written records survive a killed process and only the
    last line can be torn.

    kept: what `scan` found, for mode "resume". Locks the file: a second run that writes to it
    raises ConfigError. Not thread-safe.
    """

    def __init__(self, path: Path, mode: Mode, kept: Kept | None = None) -> None:
        check_target(path, mode)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._kept = kept or Kept()
        self.index = self._kept.index
        self._file = _open_locked(path, "xb" if mode == "new" else "ab")
        try:
            self._offset = self._begin(path, mode)
        except BaseException:
            self._file.close()
            raise

    def write(self, record: Record, place: int | None) -> None:
        """Appends one line. place: rank of the record's item in the input order, if it has one."""
        line = memoryview(record.to_json().encode() + b"\n")
        begin = self._offset
        while line:
            num_written = self._file.write(line) or 0
            self._offset += num_written
            line = line[num_written:]
        if place is not None:
            self.index.add(record, place, begin)

    def close(self) -> None:
        """Closes the file and releases its lock."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self, path: Path, mode: Mode) -> int:
        """Removes what must not stay in the file and returns its size."""
        kept = self._kept
        if mode != "resume":
            self._file.truncate(0)
            return 0
        if os.fstat(self._file.fileno()).st_size != kept.size:
            raise ConfigError(f"another run wrote to {str(path)!r} meanwhile; start this one again")
        if not kept.drops:
            self._file.truncate(kept.end)
            return kept.end
        copy = _copied(path, kept)
        self._file.close()
        self._file = copy
        return copy.tell()


def _open_locked(path: Path, mode: Literal["xb", "ab", "wb"]) -> FileIO:
    """Opens the file unbuffered and locks it against other processes until it is closed."""
    file = path.open(mode, buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(
            f"another run is writing to {str(path)!r}; wait for its end, or give another --output"
        ) from None
    except OSError as error:  # some network file systems have no locks
        logger.warning(
            "%r cannot be locked (%s): make sure that no other run writes to it",
            str(path),
            error.strerror,
        )
    return file


def _copied(path: Path, kept: Kept) -> FileIO:
    """Atomically replaces the file by a copy without `kept.drops`; returns it open for writing."""
    partial = path.with_name(path.name + ".partial")
    copy = _open_locked(partial, "wb")
    ends = [end for _, end in kept.drops]
    begins = [begin for begin, _ in kept.drops]
    with path.open("rb") as old:
        for begin, end in zip([0, *ends], [*begins, kept.end], strict=True):
            old.seek(begin)
            _copy(old.read, copy, end - begin)
    os.replace(partial, path)
    return copy


def _copy(read: Callable[[int], bytes], copy: FileIO, num_bytes: int) -> None:
    while num_bytes > 0:
        piece = memoryview(read(min(num_bytes, COPY_BYTES)))
        num_bytes -= len(piece)
        while piece:
            piece = piece[copy.write(piece) or 0 :]
