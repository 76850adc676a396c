"""RunSidecars: writes the sidecars of a run as its records are written, and fills in those that are
missing when it is resumed."""

from __future__ import annotations

from mmdeploy_llm.data.outputs.base import AroundWriter, RecordSink, Sink
from mmdeploy_llm.data.outputs.scan import RecordIndex
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.names import BUILT_IN_KINDS
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.values.closing import Closing

from .options import SidecarOptions
from .writer import SidecarCounts, Sidecars, SpotOf


class RunSidecars(Closing):
    """The sidecars of one run; none without options."""

    def __init__(
        self,
        options: SidecarOptions | None,
        spot_of: SpotOf,
        sink: Sink,
        kinds: KindTable = BUILT_IN_KINDS,
    ) -> None:
        self._sink = sink
        self._own = options and Sidecars(options, spot_of, sink.places, kinds)

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


class BesideWriter(AroundWriter):
    """Writes records, and a sidecar after each; see RecordSink for the methods."""

    def __init__(self, writer: RecordSink, sidecars: Sidecars) -> None:
        super().__init__(writer)
        self._sidecars = sidecars

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Adds a record, then writes its sidecar."""
        is_first = super().write(record, place, item)
        self._sidecars.take(record)
        return is_first
