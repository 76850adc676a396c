"""Writes the sidecars of a run, as its records are written; fills in those that are missing when it
is resumed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.datasets.names import is_url
from mmdeploy_llm.datasets.rows import BadItem
from mmdeploy_llm.errors import RequestError
from mmdeploy_llm.finding.walk import base_path
from mmdeploy_llm.records.closing import Closing
from mmdeploy_llm.records.item import Item
from mmdeploy_llm.records.record import Record
from mmdeploy_llm.sidecars.places import Spot
from mmdeploy_llm.sidecars.writer import SidecarCounts, Sidecars, picture_of
from mmdeploy_llm.sinks.base import RecordSink
from mmdeploy_llm.sinks.scan import PlaceOf, RecordIndex

from .file_source import FileSource

if TYPE_CHECKING:
    from .job import BatchJob


class RunSidecars(Closing):
    """The sidecars of one run; none where the settings ask for none."""

    def __init__(self, job: BatchJob) -> None:
        options = job.settings.sidecars
        self._sink = job.sink
        self._own = options and Sidecars(options, spots_of(job), job.sink.places)

    @property
    def counts(self) -> SidecarCounts | None:
        """The counts so far; None without sidecars."""
        return self._own.counts if self._own else None

    def around(self, writer: RecordSink) -> RecordSink:
        """Returns a writer that also writes sidecars, each after its record."""
        return BesideWriter(writer, self._own) if self._own else writer

    def fill(self, index: RecordIndex) -> None:
        """Writes the sidecars of earlier runs' records that are missing."""
        if self._own and len(index) > self._own.num_taken:
            self._own.fill(self._sink.records_at(index.offsets()))

    def close(self) -> None:
        """Closes the folder that is open."""
        if self._own:
            self._own.close()


class BesideWriter:
    """Writes records, and a sidecar after each; see RecordSink for the methods."""

    def __init__(self, writer: RecordSink, sidecars: Sidecars) -> None:
        self._writer, self._sidecars = writer, sidecars
        self.index, self.num_again = writer.index, writer.num_again

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Adds a record, then writes its sidecar."""
        is_first = self._writer.write(record, place, item)
        self.num_again = self._writer.num_again
        self._sidecars.take(record)
        return is_first

    def check(self) -> None:
        """Raises OutputLostError when somebody else changed the output."""
        self._writer.check()

    def finish(self, place_of: PlaceOf) -> None:
        """Completes the output."""
        self._writer.finish(place_of)
        self.index = self._writer.index

    def close(self) -> None:
        """Releases the lock."""
        self._writer.close()

    def __enter__(self) -> BesideWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def spots_of(job: BatchJob) -> Callable[[Record], Spot]:
    """Returns what finds the picture of a record: of files, as they were found; of a corpus,
    beneath its folder; of a program's own dicts, where they say."""
    source = job.source
    if isinstance(source, FileSource):
        return source.spot_of
    folder = job.folder

    def spot_of(record: Record) -> Spot:
        if folder is not None and is_url(folder):
            raise RequestError("its input is at a URL, where no sidecars are written")
        return Spot.beneath(folder, picture_of(record))

    return spot_of


def folder_of(given: Any) -> str | None:
    """Returns the folder of a corpus or its URL; None for the dicts of a program."""
    if not isinstance(given, (str, os.PathLike)):
        return None
    name = os.fspath(given)
    return name if is_url(name) else base_path(name)
