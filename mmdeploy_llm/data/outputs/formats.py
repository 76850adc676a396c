"""PartFormat and PartReader: what the formats of parts have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, ClassVar, Protocol

from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.growing import GrowingFile
from mmdeploy_llm.data.records.item import Item
from mmdeploy_llm.data.records.media import Blob
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.data.rows.rows import BadItem
from mmdeploy_llm.errors import ConfigError

from .scan import Entry

Drops = Sequence[tuple[int, int]]  # ranges of positions in one part


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When a part is full: after so many items, or bytes in the file that grows."""

    items: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletePart:
    """A complete part. open_name: that it had while it grew. open: opens it."""

    number: int
    open_name: str
    open: Callable[[], IO[bytes]]


class PartReader(Protocol):
    """One part that is open for reading; positions are those in this part."""

    def entries(self) -> Iterator[Entry]:
        """Yields its records. Of a part that grows, the last one may be torn and is left out;
        ConfigError for anything else that is no record."""

    def at(self, position: int) -> Record:
        """Returns the record that begins at a position."""

    def media(self, position: int) -> AbstractContextManager[Blob | None]:
        """Opens the media of the record at a position; None when the part holds none."""

    def configurations(self) -> str | None:
        """Returns the configurations that are embedded in the part, None without any."""

    def close(self) -> None:
        """Closes the file."""


class PartFormat(ABC):
    """A format of parts, whose names end in the first suffix of its spec. open_suffix: of the part
    that grows. limits: when it is full."""

    open_suffix: ClassVar[str] = ".jsonl"
    limits: Limits

    @abstractmethod
    def __init__(self, most_items: int | None) -> None:
        """most_items: of a part; None is the format's own number."""

    @abstractmethod
    def reader(self, file: IO[bytes], name: str, *, is_open: bool) -> PartReader:
        """Opens a part; closing it closes the file. is_open: whether it is the one that
        grows."""

    @abstractmethod
    def begin(self, file: GrowingFile, name: str, configurations: str | None) -> int:
        """Prepares the file that grows for additions: cuts off what is torn. Returns the position
        of the next record. Raises ConfigError when more than that is damaged."""

    @abstractmethod
    def append(self, file: GrowingFile, record: Record, item: Item | BadItem | None) -> int:
        """Adds a record to the file; returns how far the position has advanced. item: whose media a
        format may store."""

    @abstractmethod
    def seal(self, folder: Folder, name: str, configurations: str | None) -> str:
        """Makes a complete part of the file that grows; returns its name in the folder."""

    @abstractmethod
    def copy_without(self, file: IO[bytes], drops: Drops, out: IO[bytes], *, is_open: bool) -> bool:
        """Copies a part without some of its records; returns whether any record is left."""

    def outdated(self, parts: Iterable[CompletePart]) -> list[int]:
        """Returns the numbers of those parts that must be copied to be like the others: none,
        where a part has no schema."""
        return []

    def notes(self) -> tuple[str, ...]:
        """Returns what readers of the parts that were written should know, in sentences."""
        return ()


def first_positions(drops: Drops) -> frozenset[int]:
    """Returns the dropped positions where each record takes one."""
    return frozenset(position for begin, end in drops for position in range(begin, end))


def damaged(name: str, error: object) -> ConfigError:
    """Returns the error of a part that cannot be read."""
    return ConfigError(
        f"{name!r} is not a part of a batch's output: {error}; move it away and --resume does its "
        "items again, or name another --output"
    )
