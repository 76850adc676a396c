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
from io import BufferedReader, FileIO
from pathlib import Path
from typing import IO, Literal

from mmdeploy_llm.data.records.files import FileState, OutputLostError, check_regular, open_regular
from mmdeploy_llm.data.records.ids import DoneItems, IdSet
from mmdeploy_llm.data.records.outcome import ALL_FAILED, OUTCOMES, Retried
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError

from .recognise import REST_BYTES, check_overwritten, foreign, is_torn

Mode = Literal["new", "overwrite", "resume"]
PlaceOf = Callable[[Record], int | None]
DROPPED = -1  # the place of a record that is removed from the output
PART_BITS = 40  # a position in an output of parts: number of the part, then the place in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A record and its place: it takes the positions from `begin` up to `end`, which are bytes of
    a file, or rows."""

    begin: int
    end: int
    record: Record


Entries = Callable[[], Iterable[Entry]]


class RecordIndex:
    """Positions of a job's records in its output, and their counts: 17 bytes per record.

    failures: kinds of errors; outcomes: of all records; lacks: outcomes with their reasons, of
    records that are neither failed nor ok. Filled by `scan`, then by what writes the output.
    """

    def __init__(self) -> None:
        self._places = array("q")
        self._offsets = array("Q")
        self._ranks = bytearray()  # of outcomes, the worst first
        self.failures: Counter[str] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.lacks: Counter[str] = Counter()
        self.num_output_tokens = 0
        self.num_media_tokens = 0
        self.num_video_frames = 0
        self.video_seconds = 0.0
        self.num_noted = 0  # records whose media_notes say something

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_failed(self) -> int:
        """Records of failed items."""
        return self.failures.total()

    def add(self, record: Record, place: int, offset: int) -> None:
        """Adds a record at position `offset`; `place` is its rank in the input order."""
        self._places.append(place)
        self._offsets.append(offset)
        self._ranks.append(OUTCOMES.index(record.outcome))
        self.outcomes[record.outcome] += 1
        if not record.is_ok:
            self.failures[record.failure] += 1
        if record.lack is not None:
            self.lacks[record.lack] += 1
        self.num_output_tokens += record.num_output_tokens
        self.num_media_tokens += record.num_media_tokens
        self.num_video_frames += record.num_video_frames
        self.video_seconds += record.video_seconds
        self.num_noted += bool(record.media_notes)

    def offsets(self, most: int | None = None) -> list[int]:
        """Returns positions in input order; at most `most`, those with the
        worst outcomes chosen first."""
        order = sorted(range(len(self)), key=self._places.__getitem__)
        if most is not None and len(order) > most:
            order.sort(key=self._ranks.__getitem__)
            order = sorted(order[:most], key=self._places.__getitem__)
        return [self._offsets[number] for number in order]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The state of an output when a run begins.

    done: the items that are not retried.
    drops: ranges of positions (begin, end) to remove.
    state: of the file or the files when they were read; None when there were none.
    end: position at which the last complete record ends.
    configs: digests of the configurations of this input's records.
    """

    done: DoneItems = field(default_factory=DoneItems)
    index: RecordIndex = field(default_factory=RecordIndex)
    drops: tuple[tuple[int, int], ...] = ()
    state: object = None
    end: int = 0
    configs: frozenset[str] = frozenset()


def check_target(path: Path, mode: Mode) -> None:
    """Raises ConfigError when `path` cannot be written in this mode; changes nothing."""
    is_found = check_regular(path)
    if mode == "new" and is_found:
        raise ConfigError(exists_already(path))
    if mode == "overwrite":
        check_overwritten(path)


def exists_already(path: Path | str) -> str:
    """Returns the message for an output that must not exist."""
    return (
        f"{str(path)!r} exists already; --resume does what is left, --overwrite starts again, "
        "--output writes elsewhere (in Python: resume=True, overwrite=True or another output)"
    )


def scan(
    path: Path,
    place_of: PlaceOf,
    *,
    retried: Retried = ALL_FAILED,
) -> Kept:
    """Reads an existing output line by line, without changing it; see `scan_entries`. A last line
    without a line break, torn by an interruption, is not counted. Raises ConfigError for a line
    that is no record."""
    try:
        file = _open(path)
    except FileNotFoundError:
        return Kept()
    with file:
        # Before it is read: what another run appends meanwhile must not count as known.
        state = FileState.of(os.fstat(file.fileno()))
        kept = scan_entries(
            lambda: line_entries(file, path),
            place_of,
            state,
            retried=retried,
        )
        file.seek(0)
        if not kept.end and not is_torn(file.read(REST_BYTES)):
            raise ConfigError(foreign(path))
        return kept


def scan_entries(
    entries: Entries,
    place_of: PlaceOf,
    state: object,
    *,
    retried: Retried = ALL_FAILED,
) -> Kept:
    """Returns what a run keeps of the entries of an output.

    Marks for removal the records with the place DROPPED, those of this input's items that are to be
    retried, and all records of an item but the last.
    """
    found = _Scan(place_of, retried, {})
    found.read(entries())
    if found.repeated:  # again, now that it is known which records are the last ones
        found = _Scan(place_of, retried, found.repeated)
        found.read(entries())
    return found.kept(state)


class _Scan:
    """One pass over an output. last: begin of the last record of each item that has several.
    repeated: the same, as found in this pass."""

    def __init__(self, place_of: PlaceOf, retried: Retried, last: Mapping[str, int]) -> None:
        self._place_of = place_of
        self._retried, self._last = retried, last
        self.repeated: dict[str, int] = {}
        self._met, self._done, self._index = IdSet(), DoneItems(), RecordIndex()
        self._drops: list[tuple[int, int]] = []
        self._configs: set[str] = set()
        self._num_dropped = self._end = 0

    def read(self, entries: Iterable[Entry]) -> None:
        """Reads all entries."""
        for entry in entries:
            if entry.begin >> PART_BITS != self._end >> PART_BITS:
                self._num_dropped = 0  # positions count in each part of its own
            self._take(entry)
            self._end = entry.end

    def kept(self, state: object) -> Kept:
        """Returns what was found."""
        return Kept(
            done=self._done,
            index=self._index,
            drops=tuple(self._drops),
            state=state,
            end=self._end,
            configs=frozenset(self._configs),
        )

    def _take(self, entry: Entry) -> None:
        record, begin = entry.record, entry.begin
        key, place = record.key, self._place_of(record)
        if not self._met.add(key):
            self.repeated[key] = begin
        code = None if record.error is None else record.error.code
        is_again = place == DROPPED or self._retried.takes(record.outcome, code)
        is_left = place is not None and is_again
        if is_left or self._last.get(key, begin) != begin:
            self._drops.append((begin, entry.end))
            self._num_dropped += entry.end - begin
            return
        self._done.add(key, record.item_digest)
        if place is not None:
            self._index.add(record, place, begin - self._num_dropped)
            self._configs.update(filter(None, (record.config_digest,)))


def newest(entries: Entries) -> Iterator[Record]:
    """Yields the records of an output; of several records of an item only the last counts."""
    met, last = IdSet(), {}
    for entry in entries():
        if not met.add(entry.record.key):
            last[entry.record.key] = entry.begin
    for entry in entries():
        if last.get(entry.record.key, entry.begin) == entry.begin:
            yield entry.record


def read_records(path: Path) -> Iterator[Record]:
    """Yields the newest records of a file, none when it does not exist; skips a torn last line.
    Raises ConfigError for a line that is no record."""
    try:
        file = _open(path)
    except FileNotFoundError:
        return
    with file:
        yield from newest(lambda: line_entries(file, path))


def line_entries(file: IO[bytes], path: Path) -> Iterator[Entry]:
    """Yields the records of a file of lines; positions are bytes. Skips a torn last line."""
    begin = 0
    file.seek(0)
    for number, line in enumerate(whole_lines(file), 1):
        end = begin + len(line)
        yield Entry(begin=begin, end=end, record=parsed(line, path, number))
        begin = end


def records_at(path: Path, offsets: list[int]) -> Iterator[Record]:
    """Yields the records that begin at these byte offsets, in the order of the offsets."""
    with _open(path) as file:
        for offset in offsets:
            file.seek(offset)
            try:
                record = Record.from_json(file.readline())
            except (ValueError, RecursionError):
                raise changed(path) from None
            yield record


def changed(name: Path | str) -> OutputLostError:
    """Returns the error of an output that is not what it was when it was read or written."""
    return OutputLostError(
        f"{str(name)!r} was changed while its records were read; find out by whom, then read them "
        "again"
    )


def _open(path: Path) -> BufferedReader:
    return BufferedReader(open_regular(path, os.O_RDONLY))


def whole_lines(file: IO[bytes]) -> Iterator[bytes]:
    """Yields the lines that end with a line break."""
    for line in file:
        if not line.endswith(b"\n"):
            return
        yield line


def line_ends(file: FileIO, end: int | None = None) -> Iterator[int]:
    """Yields where the whole lines of a file end. end: of the last one that counts."""
    with open(file.fileno(), "rb", closefd=False) as lines:
        lines.seek(0)
        place = 0
        for line in whole_lines(lines):
            place += len(line)
            if end is not None and place > end:
                return
            yield place


def parsed(line: bytes, path: Path | str, number: int) -> Record:
    """Returns the record of a line. Raises ConfigError when it is none."""
    try:
        return Record.from_json(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"line {number} of {str(path)!r} is not a record of a batch ({error}); name another "
            "file with --output, or, if this one is an output that was damaged, remove that line, "
            "and --resume does its item again"
        ) from None
