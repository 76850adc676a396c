"""An output in the format of OpenAI's Batch API: `answers.jsonl` is written whole at the end of
each run, from the records in `answers.jsonl.records.jsonl` beside it, which a run extends and
resumes as any file of lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from mmdeploy_llm.data.openai.bodies import as_line, line_of
from mmdeploy_llm.data.records.files import Folder, check_regular, open_regular
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError

from .base import RecordSink
from .jsonl import JsonlSink
from .ours import foreign
from .scan import Kept, Mode, PlaceOf, exists_already

BEGIN = b'{"id": "batch_req_'


class OpenAISink(JsonlSink):
    """The lines of responses, and the records that they are made from; see Sink for the methods."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.with_name(f"{path.name}.records.jsonl"))
        self._made = path
        self.name = str(path)

    @property
    def places(self) -> tuple[Path, ...]:
        """The lines, the records, and the files beside them."""
        return (self._made, self._made.with_name(f"{self._made.name}.partial"), *super().places)

    def check(self, mode: Mode) -> None:
        """Raises ConfigError when the lines or the records cannot be written in this mode."""
        if check_regular(self._made):
            if mode == "new":
                raise ConfigError(exists_already(self._made))
            if not is_responses(self._made):
                raise ConfigError(foreign(self._made))
            if mode == "resume" and not self._path.exists():
                raise ConfigError(
                    f"{str(self._made)!r} is made from {str(self._path)!r}, which is missing: "
                    "put it there, or --overwrite starts again"
                )
        super().check(mode)

    def exists(self) -> bool:
        """Returns whether the lines and their records are there."""
        return self._made.exists() and super().exists()

    def writer(self, mode: Mode, kept: Kept) -> ResponseWriter:
        """Locks the records and removes what must not stay in them."""
        return ResponseWriter(self, super().writer(mode, kept))

    def write_lines(self) -> None:
        """Makes the lines of all records."""
        with Folder.open(self._made.parent) as folder:
            folder.write(self._made.name, self._lines())

    def _lines(self) -> Iterator[bytes]:
        model = ", ".join(self.configurations.models)
        created = (self.modified() or 0) // 10**9
        for entry in self.entries():
            yield as_line(line_of(entry.record, model, created))


class ResponseWriter:
    """Writes records, and the lines of responses at the end; see RecordSink for the methods."""

    def __init__(self, sink: OpenAISink, records: RecordSink) -> None:
        self._sink, self._records = sink, records
        self.index, self.num_again = records.index, records.num_again

    def write(self, record: Record, place: int | None, item: Item | BadItem | None = None) -> bool:
        """Adds a record."""
        is_first = self._records.write(record, place, item)
        self.num_again = self._records.num_again
        return is_first

    def check(self) -> None:
        """Raises OutputLostError when somebody else changed the records."""
        self._records.check()

    def finish(self, place_of: PlaceOf) -> None:
        """Completes the records and writes the lines from them."""
        self._records.finish(place_of)
        self.index = self._records.index
        self._sink.write_lines()

    def close(self) -> None:
        """Releases the lock."""
        self._records.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_responses(path: Path) -> bool:
    """Whether a file has lines that a batch has written, or nothing."""
    with open_regular(path, os.O_RDONLY) as file:
        begin = file.read(len(BEGIN)) or b""
    return begin == BEGIN or not begin
