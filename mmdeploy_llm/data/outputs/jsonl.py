"""JsonlSink: an output that is one file of JSON lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from mmdeploy_llm.data.records.configuration import ConfigurationFile
from mmdeploy_llm.data.records.files import open_regular
from mmdeploy_llm.data.records.outcome import ALL_FAILED, Retried
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.records.state import RunState

from .base import RecordSink
from .jsonl_writer import RecordWriter
from .recognise import companions
from .scan import (
    Entry,
    Kept,
    Mode,
    PlaceOf,
    check_target,
    line_entries,
    records_at,
    scan,
)


class JsonlSink:
    """A file that gains a line as each item finishes; see Sink for the methods."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)
        self.configurations = ConfigurationFile.beside(path)
        self.state_file = path.with_name(f"{path.name}.state.json")

    @property
    def places(self) -> tuple[Path, ...]:
        """The file, and those beside it."""
        return self._path, *companions(self._path)

    def check(self, mode: Mode) -> None:
        """Raises ConfigError when the file cannot be written in this mode, or the names of the
        files beside it are taken."""
        check_target(self._path, mode)
        self.configurations.check_file()
        RunState.read(self.state_file)

    def exists(self) -> bool:
        """Returns whether there is a file."""
        return self._path.exists()

    def is_growing(self) -> bool:
        """Returns False: every line is complete."""
        return False

    def scan(
        self,
        place_of: PlaceOf,
        *,
        retried: Retried = ALL_FAILED,
    ) -> Kept:
        """Reads the file without changing it."""
        return scan(self._path, place_of, retried=retried)

    def entries(self) -> Iterator[Entry]:
        """Yields the records of the file; skips a torn last line."""
        with BufferedReader(open_regular(self._path, os.O_RDONLY)) as file:
            yield from line_entries(file, self._path)

    def records_at(self, positions: list[int]) -> Iterator[Record]:
        """Yields the records at these positions."""
        return records_at(self._path, positions)

    def modified(self) -> int | None:
        """Returns when the file was written last (ns)."""
        return os.stat(self._path).st_mtime_ns

    def writer(self, mode: Mode, kept: Kept) -> RecordSink:
        """Locks the file and removes what must not stay in it."""
        return RecordWriter(self._path, mode, kept)
