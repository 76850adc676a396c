"""Parts: what is in an output of complete parts, and one that grows on this machine."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from io import BufferedReader
from pathlib import Path
from typing import IO

from mmdeploy_llm.data.records.configuration import ConfigurationFile
from mmdeploy_llm.data.records.files import FileState, Folder
from mmdeploy_llm.data.records.media import Blob
from mmdeploy_llm.data.records.outcome import ALL_FAILED, Retried
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.shelves import LocalShelf, RemoteShelf, Shelf
from mmdeploy_llm.data.records.state import RunState
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable

from .base import OutputPlace, Sink
from .formats import PartFormat, PartReader
from .recognise import foreign
from .scan import (
    PART_BITS,
    Entry,
    Kept,
    Mode,
    PlaceOf,
    changed,
    exists_already,
    scan_entries,
)

PART_ITEMS = "part_items"  # the option of formats of parts
MAX_OPEN = 8  # parts that are open for reading at the same time
PART_NAME = re.compile(r"part-(\d{5,9})(\.\w+)")
_OPEN = re.compile(r"\.open-(\d{5,9})(\.\w+)")


class Parts(Sink):
    """Reads an output of parts; see Sink for the methods, and PartsSink, which writes it too.

    shelf: where complete parts are, a folder or a URL. folder: where the part that grows is, a
    folder of this machine.
    """

    def __init__(self, place: OutputPlace, form: PartFormat) -> None:
        self.place, self.name, self.form = place, place.name, form
        self.suffix = place.provided.spec.suffixes[0]  # of a complete part
        self.shelf: Shelf
        if place.journal is None:
            self.folder = Path(place.name)
            self.shelf = LocalShelf(self.folder)
        else:
            self.folder, self.shelf = place.journal, RemoteShelf(place.name)
        self.configurations = ConfigurationFile(
            self.name, self.folder / ".config.json", self._embedded
        )
        self.state_file = self.folder / ".state.json"

    def check(self, mode: Mode) -> None:
        """Raises ConfigError when it is no folder, has parts of another format, or exists."""
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise ConfigError(
                f"{str(self.folder)!r} is a file, and an output in the format "
                f"{self.place.provided.spec.name} is a folder of parts; remove the file or name "
                "another --output"
            )
        known = self.place.part_suffixes
        for name in self.shelf.states():
            found = PART_NAME.fullmatch(name)
            if found and found[2] in known and found[2] != self.suffix:
                raise ConfigError(
                    f"{self.name!r} has parts of another format ({name}); --format "
                    f"{known[found[2]]} continues it, --output writes elsewhere"
                )
        if mode == "new" and (self.parts() or self.open_parts()):
            raise ConfigError(exists_already(self.name))
        self.configurations.check_file()
        state = RunState.read(self.state_file)
        if isinstance(self.shelf, RemoteShelf) and state and state.output != self.name:
            raise ConfigError(
                f"{str(self.folder)!r} has what is not uploaded yet to {state.output!r}; give this "
                "output another --journal"
            )
        if mode == "overwrite" and state is None:
            self._check_overwritten()

    @property
    def places(self) -> tuple[str | Path, ...]:
        """The folder, and the URL if there is one."""
        return self.name, self.folder

    def notes(self) -> tuple[str, ...]:
        """Returns what readers of the parts should know."""
        return self.form.notes()

    def _check_overwritten(self) -> None:
        """Raises ConfigError when the parts that are there are not of a batch."""
        try:
            next(self.entries(), None)
        except ConfigError:
            raise ConfigError(foreign(self.name)) from None

    def exists(self) -> bool:
        """Returns whether there are parts, or one that grows."""
        return bool(self.parts() or self.open_parts())

    def is_growing(self) -> bool:
        """Returns whether a killed run has left a part that grows."""
        return bool(self.open_parts())

    def parts(self) -> dict[int, str]:
        """Returns the names of the complete parts, by number and in this order."""
        return _numbered(PART_NAME, self.suffix, self.shelf.states())

    def open_parts(self) -> dict[int, str]:
        """Returns the names of parts that grow: at most one, unless a run was killed while it
        replaced one by a complete part, which then counts instead."""
        last = max(self.parts(), default=-1)
        found = _numbered(_OPEN, self.form.open_suffix, self._growing())
        return {number: name for number, name in found.items() if number > last}

    def void_parts(self) -> list[str]:
        """Returns the names of files whose records are in complete parts."""
        found = _numbered(_OPEN, self.form.open_suffix, self._growing())
        return [name for number, name in found.items() if number not in self.open_parts()]

    def state(self) -> object:
        """Returns what changes when somebody else writes; None where nothing is."""
        growing = self._growing()
        mine = {name: growing[name] for name in self.open_parts().values()}
        shelved = self.shelf.states()
        parts = {name: shelved.get(name) for name in self.parts().values()}
        return (parts, mine) if parts or mine else None

    def scan(
        self,
        place_of: PlaceOf,
        *,
        retried: Retried = ALL_FAILED,
    ) -> Kept:
        """Reads all parts without changing them."""
        state = self.state()
        if state is None:
            return Kept()
        return scan_entries(self.entries, place_of, state, retried=retried)

    def entries(self) -> Iterator[Entry]:
        """Yields the records of all parts."""
        parts = self.parts()
        yield from self._entries((*parts, *self.open_parts()), parts)

    def growing_entries(self) -> Iterator[Entry]:
        """Yields the records that are in no complete part yet."""
        yield from self._entries(tuple(self.open_parts()), self.parts())

    def _entries(self, numbers: Sequence[int], parts: Mapping[int, str]) -> Iterator[Entry]:
        for number in numbers:
            base = number << PART_BITS
            with closing(self._reader(number, parts)) as reader:
                for entry in reader.entries():
                    begin, end = base + entry.begin, base + entry.end
                    yield Entry(begin=begin, end=end, record=entry.record)

    def records_at(self, positions: list[int]) -> Iterator[Record]:
        """Yields the records at these positions; holds few parts open."""
        readers: OrderedDict[int, PartReader] = OrderedDict()
        parts = self.parts()
        try:
            for position in positions:
                number = position >> PART_BITS
                try:
                    if number not in readers:
                        readers[number] = self._reader(number, parts)
                    record = readers[number].at(position & ((1 << PART_BITS) - 1))
                except ConfigError:
                    raise
                except (LookupError, ValueError):  # a part that is missing, or has fewer records
                    raise changed(self.name) from None
                readers.move_to_end(number)
                if len(readers) > MAX_OPEN:
                    readers.popitem(last=False)[1].close()
                yield record
        finally:
            for reader in readers.values():
                reader.close()

    @contextmanager
    def stored_media(self, position: int) -> Iterator[Blob | None]:
        """Opens the media of the record at a position; None when the part holds none."""
        with (
            closing(self._reader(position >> PART_BITS, self.parts())) as reader,
            reader.media(position & ((1 << PART_BITS) - 1)) as blob,
        ):
            yield blob

    def modified(self) -> int | None:
        """Returns when a file of it was written last (ns); None at a URL."""
        states = (*self.shelf.states().values(), *self._growing().values())
        times = [state.mtime_ns if isinstance(state, FileState) else None for state in states]
        known = [time for time in times if time is not None]
        return max(known, default=0) if len(known) == len(times) else None

    def part_name(self, number: int) -> str:
        """Returns the name of a complete part."""
        return f"part-{number:05d}{self.suffix}"

    def open_name(self, number: int) -> str:
        """Returns the name of a part while it grows. Programs that read a folder of parts skip
        names that begin with a dot."""
        return f".open-{number:05d}{self.form.open_suffix}"

    def _reader(self, number: int, parts: Mapping[int, str]) -> PartReader:
        """Opens a part. parts: the complete ones, so that a folder at a URL is listed once for all
        of them."""
        name = parts.get(number)
        is_open = name is None
        file: IO[bytes]
        if name is not None:
            file, where = self.shelf.open(name), self.shelf.name
        else:
            name, where = self.open_parts()[number], str(self.folder)
            with Folder.open(self.folder) as folder:
                file = BufferedReader(folder.open_file(name, os.O_RDONLY))
        try:
            return self.form.reader(file, f"{where}/{name}", is_open=is_open)
        except BaseException:
            file.close()
            raise

    def _growing(self) -> Mapping[str, FileState]:
        if not self.folder.is_dir():
            return {}
        with Folder.open(self.folder) as folder:
            return folder.states()

    def _embedded(self) -> Iterator[str]:
        """Yields the configurations that stand in the parts."""
        parts = self.parts()
        for number in parts:
            with closing(self._reader(number, parts)) as reader:
                text = reader.configurations()
            if text is not None:
                yield text


def part_formats(kinds: KindTable) -> dict[str, str]:
    """Returns the names of the formats of parts, by the suffix of a part; of several the first."""
    specs = (own.spec for own in kinds.output_formats)
    found = [(own.suffixes[0], own.name) for own in specs if PART_ITEMS in own.options]
    return dict(reversed(found))


def _numbered(pattern: re.Pattern[str], suffix: str, names: Collection[str]) -> dict[int, str]:
    found = (match for match in map(pattern.fullmatch, names) if match and match[2] == suffix)
    return dict(sorted((int(match[1]), match[0]) for match in found))
