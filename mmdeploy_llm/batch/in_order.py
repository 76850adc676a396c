"""InOrder: writes the records of a run in the order of the input."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from mmdeploy_llm.data.outputs.base import AroundWriter, RecordSink
from mmdeploy_llm.data.outputs.scan import PlaceOf
from mmdeploy_llm.data.records.ids import DoneItems
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import Record, key_of
from mmdeploy_llm.data.rows.rows import BadItem


class InOrder(AroundWriter):
    """Holds each record until those of all earlier items are written. However the run ends, held
    records are written then; only the end of the process by force loses them, and the next run
    does their items again.

    done: the items that the output had before.
    """

    def __init__(self, writer: RecordSink, done: DoneItems) -> None:
        super().__init__(writer)
        self._done = done
        self._expected: deque[str] = deque()
        self._held: dict[str, tuple[Record, int | None, Item | BadItem | None]] = {}

    def noted(self, items: Iterable[Item | BadItem]) -> Iterator[Item | BadItem]:
        """Yields the items, and notes their order."""
        for item in items:
            self._expected.append(key_of(item.id, item.line))
            yield item

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Holds a record, and writes those whose turn it is; see RecordSink."""
        self._held[record.key] = (record, place, item)
        while self._expected and self._expected[0] in self._held:
            self._pass_on(self._expected.popleft())
        return record.key not in self._done

    def flush(self) -> None:
        """Writes all that is held, in the order of the input."""
        for key in [*self._expected, *self._held]:
            if key in self._held:
                self._pass_on(key)

    def _pass_on(self, key: str) -> None:
        self._writer.write(*self._held.pop(key))

    def finish(self, place_of: PlaceOf) -> None:
        """See RecordSink."""
        self.flush()
        super().finish(place_of)

    def __exit__(self, *_: object) -> None:  # who has opened the other writer closes it
        self.flush()
