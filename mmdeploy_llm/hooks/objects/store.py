"""OutputSinkSpec, CorpusFormatSpec: further formats of outputs, and of files whose rows a batch
reads; what their classes get and do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, get_args

from mmdeploy_llm.values.first_bytes import FirstBytes

OutputContent = Literal["answers", "vectors"]
OutputOption = Literal["part_items", "media_root"]
OUTPUT_CONTENTS: tuple[OutputContent, ...] = get_args(OutputContent)
OUTPUT_OPTIONS: tuple[OutputOption, ...] = get_args(OutputOption)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSinkSpec:
    """A format of outputs, in which a batch writes records. The formats of this package are
    declared so too.

    name: in lists and messages, and of `--format`.
    suffixes: what names of its outputs end in, in small letters, such as ".sqlite". Of several
        formats with a suffix the one of the highest priority has it, the others are named.
    factory: "module:Class" of a RecordStore, called as factory(path, writable) with a pathlib.Path,
        of a file or a folder on this machine. With writable=True it makes what is missing, and cuts
        off the record that a killed process was writing. With writable=False it changes nothing,
        passes over such a record, and raises an exception for what is no output of this format.
        A format of parts is a class that derives from PartFormat of
        mmdeploy_llm.data.outputs.public, called with the most items of a part or None. Other
        factories return a Sink of mmdeploy_llm.data.outputs.base, which may change with each
        version.
    holds: what its records may have, of OUTPUT_CONTENTS.
    options: those of OUTPUT_OPTIONS that have an effect on it. part_items: its outputs are folders
        of parts, or URLs. media_root: it stores pictures beside the answers.
    """

    name: str
    suffixes: tuple[str, ...]
    factory: str
    holds: tuple[str, ...] = OUTPUT_CONTENTS
    options: tuple[str, ...] = ()
    priority: int = 0


class RecordStore(ABC):
    """The records of a batch in the order in which they were written. Used by one thread at a time;
    another process may read while one writes, and two never write.

    A record is a line of JSON, UTF-8 without surrogates, which must come back exactly: `--resume`,
    reports and exports read it. What else a store makes of it, such as columns, is its own affair.
    Every method may raise any exception; what has been written stays.
    """

    @abstractmethod
    def entries(self) -> Iterator[tuple[int, str]]:
        """Yields (position, line) of all records. Positions are numbers from 0 that rise, and a
        record keeps its own as long as it is there."""

    @abstractmethod
    def get(self, position: int) -> str:
        """Returns the line of the record at a position. Raises LookupError without one."""

    @abstractmethod
    def append(self, line: str, values: Mapping[str, Any]) -> int:
        """Adds a record and returns its position, which is higher than all before. When it returns,
        the record survives the death of this process (not necessarily that of the machine); when
        it raises, the record is not there. values: those of the line."""

    @abstractmethod
    def delete(self, positions: Collection[int]) -> None:
        """Removes records, all of them or, where the process dies meanwhile, none. May put another
        file or folder in the place of the output."""

    @abstractmethod
    def close(self) -> None:
        """Closes what is open. Called once."""

    def finish(self) -> None:  # noqa: B027 - optional to override
        """Called at the end of a run, after its last record: complete the output, and have it
        written to the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFormatSpec:
    """A format of files with rows, which a batch reads like a JSONL or Parquet file.

    name: in lists and messages.
    suffixes: what names of its files end in, in small letters, such as ".warc" or ".warc.gz".
    reader: "module:function", called as function(file) with a CorpusFile, in a process of its own
        that can die. It yields, for each row, a mapping of the columns' names to their values, or a
        DamagedRow; the same rows in the same order each time. Values are None, bool, int, float,
        texts, bytes, dates, times, Decimal, and lists and mappings of these.
    first_bytes: what its files begin with, as in MediaProcessorSpec. A named file is recognised by
        them where nobody knows its suffix.
    """

    name: str
    suffixes: tuple[str, ...]
    reader: str
    first_bytes: tuple[FirstBytes, ...] = ()
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFile:
    """A file that a reader reads. path: a local path or a URL. max_bytes: of one value; a row with
    a larger one becomes an error. open: returns a new file object with its bytes, with seek; of a
    name that ends in .gz or .zst they are unpacked."""

    path: str
    max_bytes: int
    open: Callable[[], BinaryIO]


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedRow:
    """Stands for a row that cannot be read. message: says why."""

    message: str
