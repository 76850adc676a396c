"""PartsWriter: writes records to the part that grows, and makes complete parts of it."""

from __future__ import annotations

import os
from collections import defaultdict
from io import BufferedReader, FileIO
from typing import TYPE_CHECKING

from mmdeploy_llm.datasets.rows import BadItem
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.records.closing import Closing
from mmdeploy_llm.records.files import Folder, OutputLostError
from mmdeploy_llm.records.item import Item
from mmdeploy_llm.records.record import Record

from .formats import Addition, Drops
from .jsonl_writer import lock
from .lines import new_file
from .scan import PART_BITS, Kept, Mode, PlaceOf, RecordIndex

if TYPE_CHECKING:
    from .parts import PartsSink

LOCK = ".lock"


class PartsWriter(Closing):
    """Writes each record before the next one comes, so that a killed process loses at most the one
    that it was writing. Not thread-safe.

    The only writer of the files of its output: it locks a file of the folder, a second run raises
    ConfigError. Raises OutputLostError when the part that grows was removed or replaced.
    """

    def __init__(self, sink: PartsSink, mode: Mode, kept: Kept) -> None:
        sink.check(mode)
        self._sink, self._kept = sink, kept
        self.index: RecordIndex = kept.index
        self.num_again = 0
        self._folder = Folder.open(sink.folder)
        self._file: FileIO | None = None  # the part that grows, once it has a record
        self._number = self._position = self._num_items = 0
        try:
            self._lock = self._folder.open_file(LOCK, os.O_RDWR | os.O_CREAT)
        except BaseException:
            self._folder.close()
            raise
        try:
            lock(self._lock, sink.folder / LOCK)
            self._begin(mode)
        except BaseException:
            self.close()
            raise

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Adds a record to the part that grows, and completes it when it is full; see
        RecordSink."""
        is_first = record.key not in self._kept.done
        file = self._open_part()
        addition = Addition(record=record, item=item, is_again=not is_first)
        position = self._position
        self._position += self._sink.form.append(file, addition)
        self._num_items += 1
        if not is_first:
            self.num_again += 1
        elif place is not None:
            self.index.add(record, place, self._number << PART_BITS | position)
        self._check(file)
        limits = self._sink.form.limits
        if self._num_items >= limits.items or file.tell() >= limits.num_bytes:
            self._seal()
        return is_first

    def finish(self, place_of: PlaceOf) -> None:
        """Completes the last part, then removes the earlier records of items that have a newer
        one."""
        if self._file is not None:
            self._check(self._file)
            self._seal()
        if self.num_again:
            kept = self._sink.scan(place_of, is_failed_redone=False)
            self._drop(kept.drops)
            self.index = kept.index

    def close(self) -> None:
        """Closes the files and releases the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._lock.close()
        self._folder.close()

    def _begin(self, mode: Mode) -> None:
        """Removes what must not stay, and continues the part that grows."""
        sink = self._sink
        if mode != "resume":
            sink.check(mode)  # again, now that nobody else can write
            for name in sink.parts().values():
                sink.shelf.remove(name)
            for name in (*sink.open_parts().values(), *sink.void_parts()):
                self._folder.remove(name)
            return
        if sink.state() != self._kept.state:
            raise ConfigError(f"another run wrote to {sink.name!r} meanwhile; start this one again")
        for name in sink.void_parts():
            self._folder.remove(name)
        self._drop(self._kept.drops)
        self._number = max(sink.parts(), default=-1) + 1
        for number in sink.open_parts():
            self._number = number
            self._open_part()

    def _open_part(self) -> FileIO:
        """Returns the part that grows; makes it when there is none."""
        if self._file is None:
            name = self._sink.open_name(self._number)
            form = self._sink.form
            self._num_items = 0
            if name in self._folder.states():
                self._num_items = self._count(name)
                self._file = self._folder.open_file(name, os.O_RDWR)
            else:
                self._file = new_file(self._folder, name)
            self._position = form.begin(self._file, self._configurations())
        return self._file

    def _count(self, name: str) -> int:
        with self._opened(name) as file:
            return sum(1 for _ in self._sink.form.reader(file, name, is_open=True).entries())

    def _opened(self, name: str) -> BufferedReader:
        return BufferedReader(self._folder.open_file(name, os.O_RDONLY))

    def _configurations(self) -> str | None:
        text = self._sink.configurations.text
        return None if text == "{}" else text

    def _seal(self) -> None:
        """Makes a complete part of the part that grows, which is removed only then."""
        assert self._file is not None
        name, sink = self._sink.open_name(self._number), self._sink
        self._file.close()
        self._file = None
        try:
            complete = sink.form.seal(self._folder, name, self._configurations())
            sink.shelf.take(self._folder, complete, sink.part_name(self._number))
        except OSError as error:
            raise OSError(
                error.errno,
                f"a part of {sink.name!r} cannot be written ({error.strerror or error}); its "
                f"records are in {str(sink.folder / name)!r}, and --resume continues with them",
            ) from error
        self._folder.remove(name)
        self._number += 1

    def _drop(self, drops: Drops) -> None:
        """Removes records from complete parts and from the one that grows, part by part."""
        by_part: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        for begin, end in drops:
            base = begin >> PART_BITS << PART_BITS
            by_part[begin >> PART_BITS].append((begin - base, end - base))
        for number, own in by_part.items():
            self._drop_from(number, own)

    def _drop_from(self, number: int, drops: Drops) -> None:
        sink, name = self._sink, self._sink.part_name(number)
        is_open = name not in sink.parts().values()
        source, partial = sink.open_name(number), f".{name}.partial"
        with (
            new_file(self._folder, partial) as out,
            self._opened(source) if is_open else sink.shelf.open(name) as file,
        ):
            is_any = sink.form.copy_without(file, drops, out, is_open=is_open)
        if is_any and is_open:
            self._folder.replace(partial, source)
        elif is_any:
            sink.shelf.take(self._folder, partial, name)
        else:
            self._folder.remove(partial)
            self._folder.remove(source)
            if not is_open:
                sink.shelf.remove(name)

    def _check(self, file: FileIO) -> None:
        name = self._sink.open_name(self._number)
        if not self._folder.has(file, name):
            raise OutputLostError(
                f"{str(self._sink.folder / name)!r} was removed or replaced while the run wrote to "
                f"it; the complete parts of {self._sink.name!r} stay, and --resume does the rest "
                "again"
            )
