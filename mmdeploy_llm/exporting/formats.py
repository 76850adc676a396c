"""FORMATS: the formats that `mmdeploy-llm export` writes. A new one is one more row."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from mmdeploy_llm.errors import ConfigError

from .export import Export, ExportOptions, ExportSummary
from .one_file import write_csv
from .through_sinks import write_output


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A format of exports.

    endings: of the names of outputs that have it; the longest that fits a name decides, and ""
    fits any name when the format itself is named.
    about: one line of help.
    write: writes the items of an export to its output.
    """

    name: str
    endings: tuple[str, ...]
    about: str
    write: Callable[[Export], None]


FORMATS: tuple[ExportFormat, ...] = (
    ExportFormat(
        name="jsonl",
        endings=(".jsonl", ".ndjson"),
        about="records, one line of JSON each",
        write=partial(write_output, form="jsonl"),
    ),
    ExportFormat(
        name="csv",
        endings=(".csv",),
        about="a table: a row for each record",
        write=write_csv,
    ),
    ExportFormat(
        name="parquet",
        endings=(".parquet", ".pq"),
        about="a folder of Parquet files, a row for each record",
        write=partial(write_output, form="parquet"),
    ),
    ExportFormat(
        name="webdataset",
        endings=(".tar",),
        about="a folder of WebDataset tars, each answer beside its picture",
        write=partial(write_output, form="webdataset"),
    ),
)


def export_records(
    inputs: Sequence[str],
    output: str | os.PathLike[str],
    form: str | None = None,
    options: ExportOptions | None = None,
) -> ExportSummary:
    """Writes the records of one or several outputs in another format, streamed.

    form: the name of a format; None decides by the ending of `output`. Raises ConfigError for what
    is no output of a batch, an unknown format, and an output that exists.
    """
    name = os.fspath(output)
    chosen = format_of(name, form)
    export = Export(inputs, name, options or ExportOptions())
    chosen.write(export)
    return export.summary(chosen.name)


def format_of(output: str, form: str | None = None) -> ExportFormat:
    """Returns the format with this name, or that of the name of an output. Raises ConfigError."""
    named = {known.name: known for known in FORMATS}
    if form is not None:
        if form not in named:
            raise ConfigError(f"the format must be one of {', '.join(named)}, got {form[:40]!r}")
        return named[form]
    own = output.rstrip("/").lower()
    found = [
        (len(ending), known.name)
        for known in FORMATS
        for ending in known.endings
        if ending and own.endswith(ending)
    ]
    if not found:
        endings = " ".join(ending for known in FORMATS for ending in known.endings if ending)
        raise ConfigError(
            f"the name {output!r} says no format: end it in one of {endings}, or give --format "
            f"{' | '.join(named)}"
        )
    return named[max(found)[1]]
