"""CorpusFormatSpec: a further format of files whose rows a batch reads; what its reader gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

from mmdeploy_llm.values.first_bytes import FirstBytes


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
