"""PartFormat, PartReader and ArrayReader: what the formats of parts have in common. Plugins import
them from public.py."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, ClassVar, Protocol

from mmdeploy_llm.data.records.growing import GrowingPart
from mmdeploy_llm.data.records.media import Blob, OpenMedia
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError

from .scan import Entry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

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


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayPlace:
    """The rows of a record's vectors in the array of its part. num_rows: 0 where it has none.
    is_many: whether it has one for each token."""

    row: int = 0
    num_rows: int = 0
    is_many: bool = False


class ArrayReader(PartReader, Protocol):
    """A part whose vectors are one array; `search` reads it as a whole. The position of a record is
    its number."""

    @property
    def array(self) -> NDArray[np.float32]:
        """The vectors, [rows, size], which must not be written to."""

    def places(self) -> list[ArrayPlace]:
        """Returns where the vectors of each record are."""

    def keys(self) -> Iterator[str]:
        """Yields `Record.key` of the records, without reading their vectors."""


class PartFormat(ABC):
    """A format of parts, whose names end in the first suffix of its spec. Its spec has the option
    part_items, and its factory is the class.

    The core has the files: it opens them, locks the folder, uploads to URLs, notices what others
    change, and removes what a killed run has left. The format knows what is in them.

    open_suffix: of the part that grows. limits: when it is full. has_arrays: whether its readers of
    complete parts are ArrayReaders.
    """

    open_suffix: ClassVar[str] = ".jsonl"
    has_arrays: ClassVar[bool] = False
    limits: Limits

    @abstractmethod
    def __init__(self, most_items: int | None) -> None:
        """most_items: of a part; None is the format's own number."""

    @abstractmethod
    def reader(self, file: IO[bytes], name: str, *, is_open: bool) -> PartReader:
        """Opens a part; closing it closes the file. is_open: whether it is the one that
        grows."""

    @abstractmethod
    def begin(self, file: GrowingPart, name: str, configurations: str | None) -> int:
        """Prepares the file that grows for additions: cuts off what is torn. Returns the position
        of the next record. Raises ConfigError when more than that is damaged."""

    @abstractmethod
    def append(self, file: GrowingPart, record: Record, media: OpenMedia) -> int:
        """Adds a record to the file; returns how far the position has advanced. media: opens the
        first media of the item, which a format may store; raises LeftOutError."""

    @abstractmethod
    def seal(
        self,
        file: IO[bytes],
        name: str,
        new: Callable[[], IO[bytes]],
        configurations: str | None,
    ) -> bool:
        """Completes the file that grows, which is open for reading and writing: adds what ends it
        and returns False, or writes the part to the file that `new` makes and returns True. name:
        of the file that grows. When it raises, that file has the records still."""

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
