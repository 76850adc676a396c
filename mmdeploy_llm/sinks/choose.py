"""Chooses the sink of an output by its name, or by the name of a format."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from mmdeploy_llm.errors import ConfigError

from .base import Sink
from .csv_table import CsvSink
from .formats import PartFormat
from .jsonl import JsonlSink
from .lines import LineParts
from .openai import OpenAISink
from .parquet import ParquetParts
from .parts import PartsSink
from .tars import TarParts

SUFFIXES = {".parquet": "parquet", ".pq": "parquet", ".tar": "webdataset"}  # of parts
ALL_SUFFIXES = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", **SUFFIXES}
FORMATS = ("jsonl", "csv", "openai", "parquet", "webdataset")
ONE_FILE = {"jsonl": JsonlSink, "csv": CsvSink, "openai": OpenAISink}
LOCAL_SCHEMES = ("file", "local")


def open_sink(
    output: str | os.PathLike[str],
    form: str | None = None,
    *,
    part_items: int | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> Sink:
    """Returns the sink of an output; changes nothing.

    output: a file of lines, a table in CSV, a folder of parts, or a URL for parts.
    form: one of FORMATS; None decides by the suffix of the name.
    part_items: most items of a part; None is the format's own number.
    journal: folder for the part that grows when the output is a URL; see `journal_of`.

    Raises ConfigError for an unknown format, an option that does not fit, and a missing library.
    """
    name = os.fspath(output)
    kind = format_of(name, form)
    if part_items is not None and part_items < 1:
        raise ConfigError(f"part_items must be at least 1, got {part_items}")
    if is_remote(name):
        if kind in ("csv", "openai"):
            raise ConfigError(
                f"the format {kind} is written on this machine; give a path, or a URL that ends in "
                ".parquet"
            )
        folder = Path(journal_of(name) if journal is None else journal)
        return PartsSink.remote(name, folder, parts_format(kind, part_items))
    if journal is not None:
        raise ConfigError(
            "journal is for an output at a URL; one on this machine has its own beside its parts"
        )
    if kind not in ONE_FILE:
        return PartsSink.local(Path(name), parts_format(kind, part_items))
    if part_items is not None:
        raise ConfigError(f"part_items is for an output of parts; {kind} is one file")
    return ONE_FILE[kind](Path(name))


def format_of(name: str, form: str | None) -> str:
    """Returns the format of an output. Raises ConfigError for a suffix of no format, unless the
    format is named, and for one of another format."""
    if form is not None and form not in FORMATS:
        raise ConfigError(f"the format must be one of {', '.join(FORMATS)}, got {form[:40]!r}")
    suffix = os.path.splitext(name.rstrip("/"))[1].lower()
    found = ALL_SUFFIXES.get(suffix)
    if form is not None:
        is_fit = found in (None, form) or (form, found) == ("openai", "jsonl")
        if not is_fit and not os.path.lexists(name):
            raise ConfigError(f"{name!r} ends in {suffix}, which is {found}, and not {form}")
        return form
    if found is None:
        ends = f"ends in {suffix}" if suffix else "has no suffix"
        raise ConfigError(
            f"the output {name!r} {ends}, which names no format: known are "
            f"{' '.join(ALL_SUFFIXES)}; "
            f"or give the format, one of {', '.join(FORMATS)} (--format)"
        )
    return found


def is_remote(name: str) -> bool:
    """Returns whether an output is at a URL. Raises ConfigError for one of a file."""
    scheme, separator, _ = name.partition("://")
    if separator and scheme.lower() in LOCAL_SCHEMES:
        raise ConfigError(f"{name!r} is on this machine; give its path without {scheme}://")
    return bool(separator) and scheme.isascii() and scheme.replace("+", "").isalnum()


def journal_of(url: str) -> str:
    """Returns the folder in the working folder that has the part that grows of an output at a URL,
    until it is uploaded."""
    name = url.rstrip("/").rpartition("/")[2]
    return f"{name}-{blake2b(url.rstrip('/').encode(), digest_size=4).hexdigest()}.journal"


def parts_format(kind: str, part_items: int | None = None) -> PartFormat:
    """Returns a format of parts, by its name."""
    if kind == "parquet":
        return ParquetParts(part_items)
    return TarParts(part_items) if kind == "webdataset" else LineParts(part_items)
