"""Sink: an output of a batch, whatever its format; OutputPlace: what it is opened with; RecordSink:
what a run writes its records to; FileSink, CountingWriter, AroundWriter: bases of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self, runtime_checkable

from mmdeploy_llm.data.records.configuration import ConfigurationFile
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.media import Blob
from mmdeploy_llm.data.records.outcome import ALL_FAILED, Retried
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.state import RunState
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.hooks import OutputSinkSpec
from mmdeploy_llm.hooks.records import Provided
from mmdeploy_llm.values.closing import Closing

from .recognise import companions
from .scan import Entry, Kept, Mode, PlaceOf, RecordIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlace:
    """The place of an output, and what was asked of it.

    name: a path, or a URL. provided: its format. part_items: most items of a part; None is the
    format's own number. journal: of an output at a URL, the folder here for the part that grows;
    None of one on this machine. part_suffixes: suffix of a part -> name of its format, of all
    formats that are loaded.
    """

    name: str
    provided: Provided[OutputSinkSpec]
    part_items: int | None = None
    journal: Path | None = None
    part_suffixes: Mapping[str, str] = field(default_factory=dict)


class RecordSink(Protocol):
    """An output that a run writes to and has locked."""

    @property
    def index(self) -> RecordIndex:
        """The positions of the records."""

    @property
    def num_again(self) -> int:
        """The number of records of items that had one before."""

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Adds a record; returns whether it is the first of its item. place: rank of the item in
        the input order, if it has one. item: for formats that store more than the record."""

    def check(self) -> None:
        """Raises OutputLostError when somebody else moved, removed or changed the output."""

    def finish(self, place_of: PlaceOf) -> None:
        """Completes the output: of each item it has the newest record only. Called once. Raises
        OutputLostError when the output is not what was written to it."""

    def close(self) -> None:
        """Releases the lock."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class CountingWriter(Closing, ABC):
    """Adds records, of which it knows whether they are the first of their items: the base of those
    that write an output; see RecordSink. Not thread-safe. kept: what the output has already."""

    def __init__(self, kept: Kept) -> None:
        self._kept, self.index, self.num_again = kept, kept.index, 0

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Adds a record; returns whether it is the first of its item."""
        self.check()
        position = self._add(record, item)
        is_first = record.key not in self._kept.done
        if not is_first:
            self.num_again += 1
        elif place is not None:
            self.index.add(record, place, position)
        self.check()
        return is_first

    @abstractmethod
    def check(self) -> None:
        """Raises OutputLostError when somebody else changed the output."""

    @abstractmethod
    def _add(self, record: Record, item: Item | BadItem | None) -> int:
        """Adds a record to the output; returns its position."""


class AroundWriter(Closing):
    """Passes everything on to another writer: the base of those that do more; see RecordSink."""

    def __init__(self, writer: RecordSink) -> None:
        self._writer = writer

    @property
    def index(self) -> RecordIndex:
        """The positions of the records."""
        return self._writer.index

    @property
    def num_again(self) -> int:
        """The number of records of items that had one before."""
        return self._writer.num_again

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Adds a record."""
        return self._writer.write(record, place, item)

    def check(self) -> None:
        """Raises OutputLostError when somebody else changed the output."""
        self._writer.check()

    def finish(self, place_of: PlaceOf) -> None:
        """Completes the output."""
        self._writer.finish(place_of)

    def close(self) -> None:
        """Releases the lock."""
        self._writer.close()


class Readable(Protocol):
    """An output that is read. name: as the user gave it. configurations: those of its records.
    state_file: says how far its run has come, see data/records/state.py."""

    name: str
    configurations: ConfigurationFile
    state_file: Path

    def entries(self) -> Iterator[Entry]:
        """Yields all records in the order in which they were written."""

    def records_at(self, positions: list[int]) -> Iterator[Record]:
        """Yields the records at these positions, in the order of the positions."""

    def stored_media(self, position: int) -> AbstractContextManager[Blob | None]:
        """Opens the media of the record at a position; None when none are stored."""
        return nullcontext()

    def modified(self) -> int | None:
        """Returns when it was written last (ns), None when that is not known."""


@runtime_checkable
class Sink(Readable, Protocol):
    """An output of a batch."""

    place: OutputPlace

    @property
    def places(self) -> tuple[str | Path, ...]:
        """The files and folders that a run writes, or the URL."""

    def check(self, mode: Mode) -> None:
        """Raises ConfigError when the output cannot be written in this mode; changes nothing."""

    def exists(self) -> bool:
        """Returns whether it has records, or a place for them."""

    def is_growing(self) -> bool:
        """Returns whether records of it are not in a complete part yet."""
        return False

    def scan(
        self,
        place_of: PlaceOf,
        *,
        retried: Retried = ALL_FAILED,
    ) -> Kept:
        """Reads the output without changing it, see scan.scan_entries."""

    def writer(self, mode: Mode, kept: Kept) -> RecordSink:
        """Locks the output and removes what must not stay in it."""

    def notes(self) -> tuple[str, ...]:
        """Returns what readers of what was written should know, in sentences."""
        return ()


class FileSink(Sink):
    """An output that is a file or a folder, with the files of a batch beside it; see Sink. path: of
    the records, where it is another than that of the output."""

    def __init__(self, place: OutputPlace, path: Path | None = None) -> None:
        self.place, self.name = place, place.name
        self.path = path = Path(place.name) if path is None else path
        self.configurations = ConfigurationFile.beside(path)
        self.state_file = path.with_name(f"{path.name}.state.json")

    @property
    def places(self) -> tuple[Path, ...]:
        """The file or folder, and the files beside it."""
        return self.path, *companions(self.path)

    def check(self, mode: Mode) -> None:
        """Raises ConfigError when the names of the files beside it are taken."""
        self.configurations.check_file()
        RunState.read(self.state_file)
