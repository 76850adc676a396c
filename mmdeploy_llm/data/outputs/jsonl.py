"""JsonlSink: an output that is one file of JSON lines; at a URL it has parts of lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from io import BufferedReader

from mmdeploy_llm.data.records.files import open_regular
from mmdeploy_llm.data.records.outcome import ALL_FAILED, Retried
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError

from .base import FileSink, OutputPlace, RecordSink, Sink
from .jsonl_writer import RecordWriter
from .lines import LineParts
from .part_writer import PartsSink
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


def lines_at(place: OutputPlace) -> Sink:
    """Returns an output of lines: one file on this machine, parts at a URL. Raises ConfigError for
    the number of items in a part where there are no parts."""
    if place.journal is not None:
        return PartsSink(place, LineParts(place.part_items))
    if place.part_items is not None:
        raise ConfigError("part_items is for an output of parts; jsonl is one file")
    return JsonlSink(place)


class JsonlSink(FileSink):
    """A file that gains a line as each item finishes; see Sink for the methods."""

    def check(self, mode: Mode) -> None:
        """Raises ConfigError when the file cannot be written in this mode, or the names of the
        files beside it are taken."""
        check_target(self.path, mode)
        super().check(mode)

    def exists(self) -> bool:
        """Returns whether there is a file."""
        return self.path.exists()

    def scan(
        self,
        place_of: PlaceOf,
        *,
        retried: Retried = ALL_FAILED,
    ) -> Kept:
        """Reads the file without changing it."""
        return scan(self.path, place_of, retried=retried)

    def entries(self) -> Iterator[Entry]:
        """Yields the records of the file; skips a torn last line."""
        with BufferedReader(open_regular(self.path, os.O_RDONLY)) as file:
            yield from line_entries(file, self.path)

    def records_at(self, positions: list[int]) -> Iterator[Record]:
        """Yields the records at these positions."""
        return records_at(self.path, positions)

    def modified(self) -> int | None:
        """Returns when the file was written last (ns)."""
        return os.stat(self.path).st_mtime_ns

    def writer(self, mode: Mode, kept: Kept) -> RecordSink:
        """Locks the file and removes what must not stay in it."""
        return RecordWriter(self.path, mode, kept)
