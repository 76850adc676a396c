"""The JSONL output: gains a line as each item finishes, and an interrupted run can be resumed.

new        the file must not exist
overwrite  an existing file is emptied once the run is ready to write
resume     good lines stay; those of items to be retried and a torn last line are removed
"""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BufferedReader
from pathlib import Path
from typing import Literal

from mmdeploy_llm.errors import ConfigError

from .ids import DoneItems, IdSet
from .records import Record
from .storage.files import FileState, check_regular, open_regular

Mode = Literal["new", "overwrite", "resume"]
PlaceOf = Callable[[Record], int | None]


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

    done: the items that are not retried.
    drops: byte ranges (begin, end) to remove.
    state: of the file when it was read; None when there was none.
    end: offset at which its last complete line ends.
    configs: digests of the configurations of this input's records.
    num_unchecked: records of this input without digests.
    """

    done: DoneItems = field(default_factory=DoneItems)
    index: RecordIndex = field(default_factory=RecordIndex)
    drops: tuple[tuple[int, int], ...] = ()
    state: FileState | None = None
    end: int = 0
    configs: frozenset[str] = frozenset()
    num_unchecked: int = 0


def check_target(path: Path, mode: Mode) -> None:
    """Raises ConfigError when `path` cannot be written in this mode; changes nothing."""
    is_found = check_regular(path)
    if mode == "new" and is_found:
        raise ConfigError(exists_already(path))


def exists_already(path: Path) -> str:
    """Returns the message for an output that must not exist."""
    return (
        f"{str(path)!r} exists already; --resume does what is left, --overwrite starts again, "
        "--output writes elsewhere (in Python: resume=True, overwrite=True or another output)"
    )


def scan(path: Path, place_of: PlaceOf, *, is_failed_redone: bool = True) -> Kept:
    """Reads an existing output line by line, without changing it.

    Marks for removal a last line without a line break, torn by an interruption, the failures of
    this input's items that are to be retried, and all records of an item but the last. Raises
    ConfigError for a line that is no record.
    """
    last: Mapping[str, int] = {}
    while True:
        try:
            file = _open(path)
        except FileNotFoundError:
            return Kept()
        with file:
            found = _Scan(path, place_of, is_failed_redone, last)
            # Before it is read: what another run appends meanwhile must not count as known.
            state = FileState.of(os.fstat(file.fileno()))
            found.read(_whole_lines(file))
        if not found.repeated or last:
            return found.kept(state)
        last = found.repeated  # again, now that it is known which records are the last ones


class _Scan:
    """One pass over an output. last: offset of the last record of each item that has several.
    repeated: the same, as found in this pass."""

    def __init__(
        self, path: Path, place_of: PlaceOf, is_failed_redone: bool, last: Mapping[str, int]
    ) -> None:
        self._path, self._place_of = path, place_of
        self._is_failed_redone, self._last = is_failed_redone, last
        self.repeated: dict[str, int] = {}
        self._met, self._done, self._index = IdSet(), DoneItems(), RecordIndex()
        self._drops: list[tuple[int, int]] = []
        self._configs: set[str] = set()
        self._num_unchecked = self._num_dropped = self._begin = 0

    def read(self, lines: Iterable[bytes]) -> None:
        """Reads all lines."""
        for number, line in enumerate(lines, 1):
            self._take(_parsed(line, self._path, number), len(line))
            self._begin += len(line)

    def kept(self, state: FileState) -> Kept:
        """Returns what was found."""
        return Kept(
            done=self._done,
            index=self._index,
            drops=tuple(self._drops),
            state=state,
            end=self._begin,
            configs=frozenset(self._configs),
            num_unchecked=self._num_unchecked,
        )

    def _take(self, record: Record, size: int) -> None:
        key, place, begin = record.key, self._place_of(record), self._begin
        if not self._met.add(key):
            self.repeated[key] = begin
        is_left = not record.is_ok and self._is_failed_redone and place is not None
        if is_left or self._last.get(key, begin) != begin:
            self._drops.append((begin, begin + size))
            self._num_dropped += size
            return
        self._done.add(key, record.item_digest)
        if place is not None:
            self._index.add(record, place, begin - self._num_dropped)
            self._configs.update(filter(None, (record.config_digest,)))
            self._num_unchecked += not record.item_digest


def read_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file, none when it does not exist; skips a torn last line. Of several
    records of an item only the last counts.

    Raises ConfigError for a line that is no record.
    """
    last = _repeated(path)
    for begin, record in _records(path):
        if last.get(record.key, begin) == begin:
            yield record


def _repeated(path: Path) -> dict[str, int]:
    """Returns the offset of the last record of each item that has several."""
    met, last = IdSet(), {}
    for begin, record in _records(path):
        if not met.add(record.key):
            last[record.key] = begin
    return last


def _records(path: Path) -> Iterator[tuple[int, Record]]:
    """Yields the offset and the record of each line."""
    begin = 0
    try:
        file = _open(path)
    except FileNotFoundError:
        return
    with file:
        for number, line in enumerate(_whole_lines(file), 1):
            yield begin, _parsed(line, path, number)
            begin += len(line)


def records_at(path: Path, offsets: list[int]) -> Iterator[Record]:
    """Yields the records that begin at these byte offsets, in the order of the offsets."""
    with _open(path) as file:
        for offset in offsets:
            file.seek(offset)
            yield Record.from_json(file.readline())


def _open(path: Path) -> BufferedReader:
    return BufferedReader(open_regular(path, os.O_RDONLY))


def _whole_lines(file: BufferedReader) -> Iterator[bytes]:
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
