"""Makes what a resumed run has left to do a source of its own: an estimate is of these items."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mmdeploy_llm.batch.settings import BatchJob
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem, Lines


class LeftSource:
    """The items of a job that are left to do. Those of rows can be iterated once, and their number
    is known then; see Source."""

    total: int | None = None
    mean_size: float | None = None

    def __init__(self, job: BatchJob) -> None:
        self._source, self._items = job.source, job.items
        self.unit, self.about, self.skipped = self._source.unit, "", self._source.skipped
        sizes = self._source.sizes()
        lines = {item.line for item in job.items} if sizes else set()
        self._sizes = {line: size for line, size in sizes.items() if line in lines}

    def __iter__(self) -> Iterator[Item | BadItem]:
        """Yields the items."""
        return self._items

    def read(self, lines: Lines) -> Iterator[Item | BadItem]:
        """Yields the items of these lines."""
        return self._source.read(lines)

    def sizes(self) -> Mapping[int, int]:
        """Returns the bytes of the file of every item by its line."""
        return self._sizes

    def kinds(self) -> Mapping[int, str]:
        """Returns the kind of the file of every item by its line."""
        return self._source.kinds()

    def place_of(self, record: Record) -> int | None:
        """Returns the position of the record's item in the whole input."""
        return self._source.place_of(record)

    def counted(self) -> int | None:
        """Returns the number of files; None for rows."""
        return len(self._sizes) or None
