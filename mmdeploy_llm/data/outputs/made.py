"""MadeSink: an output that is written whole at the end of each run, from the records in a file of
lines beside it, which a run extends and resumes as any file of lines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from mmdeploy_llm.data.records.files import Folder, check_regular
from mmdeploy_llm.errors import ConfigError

from .base import AroundWriter, OutputPlace, RecordSink
from .jsonl import JsonlSink
from .recognise import foreign
from .scan import Kept, Mode, PlaceOf, exists_already


class MadeSink(JsonlSink, ABC):
    """A file that is made of records, which are in a file of lines whose name ends in `ending`; see
    Sink for the methods."""

    ending: ClassVar[str]

    def __init__(self, place: OutputPlace) -> None:
        self.made = Path(place.name)
        super().__init__(place, self.made.with_name(f"{self.made.name}{self.ending}"))

    @abstractmethod
    def is_ours(self) -> bool:
        """Returns whether what is there was made by a batch."""

    @abstractmethod
    def pieces(self) -> Iterable[bytes]:
        """Yields the content, from the records."""

    @property
    def places(self) -> tuple[Path, ...]:
        """The file, the records, and the files beside them."""
        return (self.made, self.made.with_name(f"{self.made.name}.partial"), *super().places)

    def check(self, mode: Mode) -> None:
        """Raises ConfigError when the file or the records cannot be written in this mode."""
        if check_regular(self.made):
            if mode == "new":
                raise ConfigError(exists_already(self.made))
            if not self.is_ours():
                raise ConfigError(foreign(self.made))
            if mode == "resume" and not self.path.exists():
                raise ConfigError(
                    f"{str(self.made)!r} is made from {str(self.path)!r}, which is missing, as it "
                    "is beside a table that was exported: put it there, or --overwrite starts again"
                )
        super().check(mode)

    def exists(self) -> bool:
        """Returns whether the file and its records are there."""
        return self.made.exists() and super().exists()

    def writer(self, mode: Mode, kept: Kept) -> RecordSink:
        """Locks the records and removes what must not stay in them."""
        return _MadeWriter(self, super().writer(mode, kept))


class _MadeWriter(AroundWriter):
    """Writes records, and at the end what is made of them."""

    def __init__(self, sink: MadeSink, records: RecordSink) -> None:
        super().__init__(records)
        self._sink = sink

    def finish(self, place_of: PlaceOf) -> None:
        """Completes the records and writes the file from them."""
        super().finish(place_of)
        with Folder.open(self._sink.made.parent) as folder:
            folder.write(self._sink.made.name, self._sink.pieces())
