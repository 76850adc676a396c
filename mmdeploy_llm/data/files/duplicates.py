"""Duplicates: items that ask the same of the same picture are answered once and recorded for all.

    item --> content known?  --no--> asked, and its record kept
                '--yes, answered--> its own copy of that record, at once
                '--yes, being asked--> waits for that record

Records are kept in a temporary file, so that memory has a digest and a place for each.
"""

from __future__ import annotations

import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from mmdeploy_llm.data.outputs.base import Sink
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import Record, Timings
from mmdeploy_llm.values.closing import Closing

from .contents import Contents
from .options import FindingOptions

OF_CONTENT = (400, 413, 415)  # faults that every file of this content has


class Duplicates(Closing):
    """The answers of a batch by what was asked. Thread-safe.

    known: records of earlier runs, of the same configuration. num: duplicates so far.
    """

    def __init__(self, contents: Contents, known: Iterable[Record] = ()) -> None:
        self._contents = contents
        self._lock = threading.Lock()
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  (closed by `close`)
        self._places: dict[str, tuple[int, int]] = {}
        self._asked: dict[str | int, str] = {}  # content of the items that are being asked, by id
        self._waiting: defaultdict[str, list[Item]] = defaultdict(list)
        self.num = 0
        for record in known:
            if record.content and record.same_as is None and record.is_ok:
                self._keep(record.content, record)

    def close(self) -> None:
        """Removes the temporary file."""
        self._file.close()

    def met(self, item: Item) -> Record | bool:
        """Says what is done with an item: False: it is asked; True: it waits for the record of an
        item that is being asked; else its record."""
        content = self._contents.of(item)
        if not content:
            return False
        with self._lock:
            if content in self._places:
                self.num += 1
                return _copy(self._kept(content), item)
            if content in self._waiting:
                self._waiting[content].append(item)
                return True
            self._waiting[content] = []
            self._asked[item.id] = content
            return False

    def answered(self, item: Item, record: Record) -> tuple[Record, list[tuple[Item, Record]]]:
        """Takes the record of an item that was asked. Returns it with its content, and the items
        that have waited for it with their records."""
        with self._lock:
            content = self._asked.pop(item.id, "")
            if not content:
                return record, []
            record = replace(record, content=content)
            if record.error is None or record.error.code in OF_CONTENT:
                self._keep(content, record)
            others = self._waiting.pop(content, [])
            self.num += len(others)
            return record, [(other, _copy(record, other)) for other in others]

    def _keep(self, content: str, record: Record) -> None:
        data = record.to_json().encode()
        self._places.setdefault(content, (self._file.seek(0, 2), len(data)))
        self._file.write(data)

    def _kept(self, content: str) -> Record:
        place, size = self._places[content]
        self._file.seek(place)
        return Record.from_json(self._file.read(size))


def _copy(record: Record, item: Item) -> Record:
    """Returns the record of an item with the answer of another one. Nothing was computed for it: it
    has no counts and no times. An error names its own file."""
    fault = record.error
    if fault is not None and record.path and item.path:
        fault = replace(fault, message=fault.message.replace(record.path, item.path))
    return replace(
        record,
        id=item.id,
        line=None if item.path is not None else item.line,
        path=item.path,
        media=item.media,
        prompt=item.question,
        columns=item.columns,
        item_digest=item.digest,
        same_as=record.id if record.same_as is None else record.same_as,
        error=fault,
        timings=Timings(),
        num_image_tokens=0,
        num_video_tokens=0,
        num_tokens_by_kind={},
        num_prompt_tokens=0,
        num_output_tokens=0,
        num_cached_tokens=0,
    )


@contextmanager
def duplicates_of(options: FindingOptions, sink: Sink, config: str) -> Iterator[Duplicates | None]:
    """Opens the duplicates of a run; None where they are not looked for. sink: the output, with the
    records of earlier runs. config: digest of the run's configuration."""
    if options.dedupe is None:
        yield None
        return
    assert options.open_reader is not None, "who plans a batch knows the engine"
    contents = Contents(options.dedupe, options.open_reader)
    records = (entry.record for entry in sink.entries())
    known = (record for record in records if record.config_digest == config)
    with Duplicates(contents, known) as duplicates:
        yield duplicates
