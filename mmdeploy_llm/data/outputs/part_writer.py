"""PartsSink: an output of parts. PartsWriter: writes records to the part that grows, and makes
complete parts of it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from io import BufferedRandom, BufferedReader, BufferedWriter

from mmdeploy_llm.data.records.files import Folder, OutputLostError, OutputWriteError
from mmdeploy_llm.data.records.growing import GrowingFile
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.media import first_media
from mmdeploy_llm.data.records.outcome import NOTHING
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.guarding.claims import LOCK, held

from .base import CountingWriter
from .formats import CompletePart, Drops
from .lines import new_file
from .parts import Parts
from .scan import PART_BITS, Kept, Mode, PlaceOf

MAX_NAMED = 5


class PartsWriter(CountingWriter):
    """Writes each record before the next one comes, so that a killed process loses at most the one
    that it was writing.

    The only writer of the files of its output: it locks a file of the folder, a second run raises
    ConfigError. Raises OutputLostError when the folder was removed or replaced, or somebody else
    changed the part that grows or, at the end, a complete one.
    """

    def __init__(self, sink: Parts, mode: Mode, kept: Kept) -> None:
        super().__init__(kept)
        sink.check(mode)
        self._sink = sink
        self._folder = Folder.open(sink.folder)
        self._file: GrowingFile | None = None  # the part that grows, once it has a record
        self._parts: dict[str, object] = {}  # complete parts with their states
        self._number = self._position = self._num_items = 0
        try:
            self._lock, _ = held(
                lambda: self._folder.open_file(LOCK, os.O_RDWR | os.O_CREAT),
                lambda file: self._folder.has(file, LOCK),
                sink.name,
            )
        except BaseException:
            self._folder.close()
            raise
        try:
            self._begin(mode)
        except BaseException:
            self.close()
            raise

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Adds a record to the part that grows, and completes it when it is full; see
        RecordSink."""
        is_first = super().write(record, place, item)
        limits = self._sink.form.limits
        if self._num_items >= limits.items or self._open_part().size >= limits.num_bytes:
            self._seal()
        return is_first

    def _add(self, record: Record, item: Item | BadItem | None) -> int:
        """Adds a record to the part that grows."""
        file, position = self._open_part(), self._position
        with self._writing():
            self._position += self._sink.form.append(file, record, partial(first_media, item))
        self._num_items += 1
        return self._number << PART_BITS | position

    def check(self) -> None:
        """Raises OutputLostError when the folder or the part that grows has another name or size
        than this run gave it."""
        if not self._folder.is_in_place:
            raise OutputLostError(self._words_of_lost_folder())
        file = self._file
        if file is None:
            return
        if not self._folder.has(file.file, file.path.name):
            raise OutputLostError(self._words_of_lost_file(file))
        if not file.is_same_size:
            raise OutputLostError(file.words_of_change())

    def finish(self, place_of: PlaceOf) -> None:
        """Completes the last part and looks whether all are there, then removes the earlier records
        of items that have a newer one."""
        self.check()
        if self._file is not None:
            self._seal()
        self._check_parts()
        self._unify()
        if self.num_again:
            kept = self._sink.scan(place_of, retried=NOTHING)
            with self._writing():
                self._drop(kept.drops)
            self.index = kept.index

    def close(self) -> None:
        """Closes the files and releases the lock."""
        if self._file is not None:
            self._file.close()
            self._file = None
        with suppress(OSError, ValueError):  # it may be closed already
            self._lock.truncate(0)  # it stays, and names no process
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
        self._parts = self._found_parts()
        if sink.state() != self._kept.state:
            raise ConfigError(f"another run wrote to {sink.name!r} meanwhile; start this one again")
        for name in sink.void_parts():
            self._folder.remove(name)
        self._drop(self._kept.drops)
        self._number = max(sink.parts(), default=-1) + 1
        for number in sink.open_parts():
            if self._file is not None:
                self._seal()
            self._number = number
            self._open_part()

    def _open_part(self) -> GrowingFile:
        """Returns the part that grows; makes it when there is none."""
        if self._file is None:
            name = self._sink.open_name(self._number)
            self._num_items = 0
            if name in self._folder.states():
                self._num_items = self._count(name)
                raw = self._folder.open_file(name, os.O_RDWR)
            else:
                raw = new_file(self._folder, name)
            self._file = GrowingFile(raw, self._sink.folder / name)
            where = str(self._file.path)
            self._position = self._sink.form.begin(self._file, where, self._configurations())
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
        part = sink.part_name(self._number)
        self._file.check_content()
        with self._writing():
            complete = self._completed(name)
            if complete != name:
                self._file.check_content()  # again, now that it was read
            self._parts[part] = sink.shelf.take(self._folder, complete, part)
        self._file.close()
        self._file = None
        self._folder.remove(name)
        self._number += 1

    def _completed(self, name: str) -> str:
        """Has the format complete the file that grows; returns the name of the part."""
        made = f"{name}.partial"

        def new() -> BufferedWriter:
            return BufferedWriter(new_file(self._folder, made))

        try:
            with BufferedRandom(self._folder.open_file(name, os.O_RDWR)) as file:
                is_new = self._sink.form.seal(file, name, new, self._configurations())
        except BaseException:
            self._folder.remove(made)  # a disk that is full
            raise
        return made if is_new else name

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Leaves whole records when the system, or a store, takes no more, and says what to do."""
        try:
            yield
        except OutputLostError:
            raise
        except ConfigError:
            self._roll_back()
            raise
        except OSError as error:
            self._roll_back()
            where = self._sink.folder / self._sink.open_name(self._number)
            raise OutputWriteError(
                error.errno,
                f"a part of {self._sink.name!r} cannot be written ({error.strerror or error}); its "
                f"records are in {str(where)!r}: make space, or whatever it lacks, then --resume "
                "continues with them",
            ) from error

    def _roll_back(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.roll_back()

    def _found_parts(self) -> dict[str, object]:
        states = self._sink.shelf.states()
        return {name: states[name] for name in self._sink.parts().values() if name in states}

    def _check_parts(self) -> None:
        """Raises OutputLostError when complete parts are not as this run wrote or found them."""
        found = self._sink.shelf.states()
        lost = [name for name, state in self._parts.items() if found.get(name) != state]
        if lost:
            names = ", ".join(lost[:MAX_NAMED]) + (", ..." if len(lost) > MAX_NAMED else "")
            raise OutputLostError(
                f"{len(lost)} of {len(self._parts)} parts of {self._sink.name!r} were removed or "
                f"changed while the run wrote to it ({names}); the others stay. Move away those "
                "that are damaged, then --resume does theirs again"
            )

    def _unify(self) -> None:
        """Writes those parts again whose schema is narrower than that of the others."""
        parts = [
            CompletePart(
                number=number,
                open_name=self._sink.open_name(number),
                open=partial(self._sink.shelf.open, name),
            )
            for number, name in self._sink.parts().items()
        ]
        with self._writing():
            for number in self._sink.form.outdated(parts):
                self._drop_from(number, [])

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
        source, copy = sink.open_name(number), f".{name}.partial"
        with (
            BufferedWriter(new_file(self._folder, copy)) as out,
            self._opened(source) if is_open else sink.shelf.open(name) as file,
        ):
            is_any = sink.form.copy_without(file, drops, out, is_open=is_open)
        if is_any and is_open:
            self._folder.replace(copy, source)
        elif is_any:
            self._parts[name] = sink.shelf.take(self._folder, copy, name)
        else:
            self._folder.remove(copy)
            self._folder.remove(source)
            if not is_open:
                sink.shelf.remove(name)
                self._parts.pop(name, None)

    def _words_of_lost_folder(self) -> str:
        folder = repr(str(self._sink.folder))
        begin = f"{folder} was removed or replaced while the run wrote to it; "
        place = self._folder.place
        if place is not None:
            return (
                f"{begin}its results are in {place!r}: give that folder its name again, then "
                "--resume continues"
            )
        saved = None if self._file is None else self._file.place()
        if saved is None:
            return f"{begin}what it held is gone, and --resume does it again"
        return (
            f"{begin}its complete parts are gone. What has come since the last one is in {saved!r}:"
            f" move it to {str(self._sink.folder / self._sink.open_name(0))!r}, then --resume does "
            "the rest"
        )

    def _words_of_lost_file(self, file: GrowingFile) -> str:
        begin = f"{str(file.path)!r} was removed or replaced while the run wrote to it; "
        end = f"the complete parts of {self._sink.name!r} stay, and --resume does the rest again"
        place = file.place()
        if place is None:
            return begin + end
        return f"{begin}its records are in {place!r}: rename that file to it, or else {end}"


class PartsSink(Parts):
    """An output of parts; see Sink for the methods."""

    def writer(self, mode: Mode, kept: Kept) -> PartsWriter:
        """Locks the output and removes what must not stay in it."""
        return PartsWriter(self, mode, kept)
