"""StoreSink: an output that a RecordStore reads and writes.

A position is the store's own number of a record, which does not change when others are removed, so
an Entry ends where it begins. Whatever the store raises is told with the name of its plugin.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from io import FileIO
from typing import cast

from mmdeploy_llm.data.outputs.base import CountingWriter, FileSink, OutputPlace
from mmdeploy_llm.data.outputs.scan import (
    Entry,
    Kept,
    Mode,
    PlaceOf,
    changed,
    exists_already,
    scan_entries,
)
from mmdeploy_llm.data.records.files import OutputLostError, OutputWriteError, is_at
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.outcome import ALL_FAILED, NOTHING, Retried
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError, MMDeployLLMError, PluginContractError, PluginError
from mmdeploy_llm.hooks import RecordStore
from mmdeploy_llm.hooks.factories import build
from mmdeploy_llm.hooks.records import FAULTS, describe
from mmdeploy_llm.system.guarding.claims import lock
from mmdeploy_llm.system.portable import files
from mmdeploy_llm.values.text.display import error_text

MAX_POSITION = 2**63


class StoreSink(FileSink):
    """An output whose format is a RecordStore; see Sink for the methods."""

    def __init__(self, place: OutputPlace) -> None:
        super().__init__(place)
        self.about = f"{describe(place.provided.spec)} of {place.provided.origin}"

    def check(self, mode: Mode) -> None:
        """Raises ConfigError when the output cannot be written in this mode or is of something
        else."""
        if self.exists():
            if mode == "new":
                raise ConfigError(exists_already(self.path))
            next(self.entries(), None)  # or raises, where it is no output
        super().check(mode)

    def exists(self) -> bool:
        """Returns whether there is a file or folder. Raises ConfigError for anything else."""
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return False
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise ConfigError(
                f"{self.name!r} is a link or no file; name the file itself, or another --output"
            )
        return True

    def scan(self, place_of: PlaceOf, *, retried: Retried = ALL_FAILED) -> Kept:
        """Reads the output without changing it."""
        if not self.exists():
            return Kept()
        state = self.positions()  # before it is read: what comes later must not count as known
        return scan_entries(self.entries, place_of, state, retried=retried)

    def entries(self) -> Iterator[Entry]:
        """Yields the records."""
        with closing(self.open(is_written=False)) as store, self.reading():
            for position, line in self.rows_of(store):
                record = self._parsed(position, line)
                yield Entry(begin=position, end=position, record=record)

    def records_at(self, positions: list[int]) -> Iterator[Record]:
        """Yields the records at these positions."""
        with closing(self.open(is_written=False)) as store, self.reading():
            for position in positions:
                try:
                    line = store.get(position)
                except LookupError:
                    raise changed(self.name) from None
                yield self._parsed(position, line)

    def positions(self) -> tuple[int, int]:
        """Returns the number of records and the last position."""
        with closing(self.open(is_written=False)) as store, self.reading():
            return self.counted(store)

    def counted(self, store: RecordStore) -> tuple[int, int]:
        """Returns the number of records of an open store, and the last position, -1 without."""
        number, last = 0, -1
        for position, _ in self.rows_of(store):
            number, last = number + 1, position
        return number, last

    def modified(self) -> int | None:
        """Returns when the output was written last, or a run of it ended (ns)."""
        times = [os.stat(self.path).st_mtime_ns]
        with suppress(FileNotFoundError):
            times.append(os.stat(self.state_file).st_mtime_ns)
        return max(times)

    def writer(self, mode: Mode, kept: Kept) -> StoreWriter:
        """Locks the output and removes what must not stay in it."""
        return StoreWriter(self, mode, kept)

    def open(self, *, is_written: bool) -> RecordStore:
        """Opens the store. Raises PluginError when it is none, ConfigError where it refuses, and
        OutputWriteError where it cannot be written."""
        own = self.place.provided
        with self.writing() if is_written else self.reading():
            try:
                store: RecordStore = build(own.spec, own.origin, (self.path, is_written))
            except PluginError as error:
                raise error.__cause__ or error from None  # what the store says of the output
        return store

    def rows_of(self, store: RecordStore) -> Iterator[tuple[int, str]]:
        """Yields what the store yields. Raises PluginContractError where that breaks the
        contract."""
        last = -1
        for found in store.entries():
            if not isinstance(found, tuple) or len(found) != 2:
                raise PluginContractError(f"{self.about}: entries must be pairs, got {found!r:.80}")
            position, line = found
            self.check_position(position, last)
            yield position, line
            last = position

    def check_position(self, position: object, last: int) -> None:
        """Raises PluginContractError for a position that is none, or does not rise."""
        is_number = isinstance(position, int) and not isinstance(position, bool)
        if not is_number or not last < position < MAX_POSITION:  # type: ignore[operator]
            raise PluginContractError(
                f"{self.about}: positions must be numbers from 0 that rise, got {position!r:.80} "
                f"after {last}"
            )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Names the plugin in what it raises while it reads."""
        try:
            yield
        except (MMDeployLLMError, OutputWriteError):
            raise
        except FAULTS as error:
            raise ConfigError(
                f"{self.name!r} cannot be read: {self.about}: {error_text(error)}; move it away, "
                "or name another --output"
            ) from error

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Says what to do when the store takes no more."""
        try:
            yield
        except (MMDeployLLMError, OutputWriteError):
            raise
        except FAULTS as error:
            raise OutputWriteError(
                getattr(error, "errno", None) or errno.EIO,
                f"{self.name!r} cannot be written: {self.about}: {error_text(error)}; make space, "
                "or whatever it lacks, then --resume does what is missing",
            ) from error

    def _parsed(self, position: int, line: object) -> Record:
        try:
            if not isinstance(line, str):
                raise ValueError(f"it is a {type(line).__name__}, not a text")
            return Record.from_json(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"record {position} of {self.name!r} is not a record of a batch ({error}; "
                f"{self.about}); name another --output"
            ) from None


class StoreWriter(CountingWriter):
    """Writes the records of one run; see RecordSink."""

    def __init__(self, sink: StoreSink, mode: Mode, kept: Kept) -> None:
        super().__init__(kept if mode == "resume" else Kept())
        self._sink = sink
        self._number, self._last = 0, -1  # of the records in the store
        self._absolute = os.path.abspath(sink.path)
        sink.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not sink.exists()
        if mode == "new" and not is_new:
            raise ConfigError(exists_already(sink.path))
        self._lock = None if is_new else self._locked()
        self._store: RecordStore | None = None
        try:
            self._store = sink.open(is_written=True)
            if self._lock is None:
                self._lock = self._locked()
            self._begin(mode, is_new)
        except BaseException:
            self.close()
            raise

    def _add(self, record: Record, item: Item | BadItem | None) -> int:
        """Adds a record to the store."""
        line = record.to_json()
        with self._sink.writing():
            position: int = self._opened.append(line, json.loads(line))
            self._sink.check_position(position, self._last)
        self._number, self._last = self._number + 1, position
        return position

    def check(self) -> None:
        """Raises OutputLostError when something else has its path."""
        if self._lock is None or not is_at(self._lock, self._absolute):
            raise OutputLostError(
                f"{self._sink.name!r} was removed or replaced while the run wrote to it; find out "
                "by whom, and put it there again: then --resume continues"
            )

    def finish(self, place_of: PlaceOf) -> None:
        """Removes the earlier records of items that have a newer one, and completes the output."""
        self.check()
        self._compare()
        if self.num_again:
            kept = self._sink.scan(place_of, retried=NOTHING)
            self._remove([begin for begin, _ in kept.drops])
            self.index = kept.index
        with self._sink.writing():
            self._opened.finish()
        self.check()

    def close(self) -> None:
        """Closes the store, then releases the lock: a file that this process closes would take the
        store's own locks with it."""
        store, self._store = self._store, None
        try:
            if store is not None:
                with self._sink.writing():
                    store.close()
        finally:
            if self._lock is not None:
                self._lock.close()

    @property
    def _opened(self) -> RecordStore:
        assert self._store is not None, "the writer is closed"
        return self._store

    def _begin(self, mode: Mode, is_new: bool) -> None:
        """Removes what must not stay in the output."""
        with self._sink.writing():
            self._number, self._last = self._sink.counted(self._opened)
        if mode == "overwrite":
            with self._sink.writing():
                every = [position for position, _ in self._sink.rows_of(self._opened)]
            self._remove(every)
        elif (self._kept.state or (0, -1)) != (self._number, self._last):
            raise ConfigError(
                f"another run wrote to {self._sink.name!r} meanwhile; start this one again"
            )
        self._remove([begin for begin, _ in self._kept.drops])

    def _remove(self, positions: list[int]) -> None:
        if positions:
            with self._sink.writing():
                self._opened.delete(positions)
            if self._lock is not None and not is_at(self._lock, self._absolute):
                replaced, self._lock = self._lock, self._locked()  # by a copy without them
                replaced.close()
            self._number -= len(positions)
            self._compare()

    def _compare(self) -> None:
        """Raises OutputLostError when the store has not what was written to it."""
        with self._sink.reading():
            number, _ = self._sink.counted(self._opened)
        if number != self._number:
            raise OutputLostError(
                f"{self._sink.name!r} has {number} records, and {self._number} were written "
                f"({self._sink.about}); find out why, then --resume does what is missing"
            )

    def _locked(self) -> FileIO:
        """Locks the file or folder against other runs."""
        try:
            fd = files.open_unfollowed(self._sink.path, os.O_RDONLY)
        except FileNotFoundError:
            raise PluginContractError(
                f"{self._sink.about} has made nothing at {self._sink.name!r}"
            ) from None
        file = cast(FileIO, _Held(fd))
        try:
            lock(file, self._sink.path)
        except BaseException:
            file.close()
            raise
        return file


class _Held:
    """Holds the descriptor of a file or folder, which is used for its lock."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """Returns the descriptor."""
        return self._fd

    def close(self) -> None:
        """Closes it."""
        os.close(self._fd)
