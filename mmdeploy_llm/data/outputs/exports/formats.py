"""The formats that `mmdeploy-llm export` writes: those of outputs, and FORMATS, a row for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

from mmdeploy_llm.data.files.chosen_kinds import installed_kinds
from mmdeploy_llm.data.outputs.csv_table import CsvSink, CsvTable
from mmdeploy_llm.data.outputs.opening.choose import (
    check_left_out,
    known_format,
    open_sink,
    tell_who_writes,
)
from mmdeploy_llm.data.outputs.scan import Kept
from mmdeploy_llm.data.records.state import RunState
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.hooks import KindTable

from .boxes import write_coco, write_yolo
from .export import Export, ExportOptions, ExportSummary
from .imagefolder import METADATA, write_imagefolder
from .pictures import write_kohya, write_sidecars


def write_output(export: Export, form: str) -> None:
    """Writes the records as an output of a batch."""
    options = export.options
    sink = open_sink(export.output, form, part_items=options.part_items, kinds=options.kinds)
    export.check_apart(sink.places)
    mode = cast(Literal["new", "overwrite"], export.mode)
    sink.check(mode)
    with sink.writer(mode, Kept()) as writer:
        sink.configurations.adopt([source.configurations for source in export.sources])
        state = RunState(ending="running", total=None, shard=1, num_shards=1, output=sink.name)
        state.write(sink.state_file)
        for item in export.items():
            writer.write(item.record, item.number, item.item() if item.record.is_ok else None)
        writer.finish(lambda record: record.line)
        export.notes += sink.notes()
        if export.is_complete:
            RunState(ending="done", total=None, shard=1, num_shards=1, output=sink.name).write(
                sink.state_file
            )


def write_csv(export: Export) -> None:
    """Writes a table in CSV, with a column for each answer and each carried column."""
    records = f"{export.output}{CsvSink.ending}"
    if os.path.lexists(records):
        raise ConfigError(
            f"{export.output!r} is the table of the records in {records!r}, which would not be "
            "those of the table any more; write elsewhere"
        )
    table = CsvTable(lambda: (item.record for item in export.items()))
    export.write_file(table)
    if table.num_guarded:
        export.notes.append(
            f"{table.num_guarded} cells begin like a formula of a spreadsheet and have an "
            "apostrophe before them"
        )


OF_SOME = ("part_items", "sidecar", "repeats", "media_root")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A format of exports.

    write: writes the items of an export to its output.
    endings: of the names of outputs that have it; the longest that fits a name decides. Without
        any, the format is named, or is that of an output.
    uses: the fields of ExportOptions, and on_existing, that have an effect on it; the others are
        errors.
    """

    name: str
    write: Callable[[Export], None]
    endings: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()

    def check(self, options: ExportOptions) -> None:
        """Raises ConfigError for an option that has no effect on this format."""
        plain = ExportOptions()
        given = {name: getattr(options, name) != getattr(plain, name) for name in OF_SOME}
        given["on_existing"] = options.sidecar.on_existing != plain.sidecar.on_existing
        for name, is_given in given.items():
            if is_given and name not in self.uses:
                what = "the text beside a picture" if name == "sidecar" else name
                raise ConfigError(f"{what} has no effect on the format {self.name}")


FORMATS: tuple[ExportFormat, ...] = (
    ExportFormat(
        name="csv",
        write=write_csv,
    ),
    ExportFormat(
        name="imagefolder",
        endings=(f"/{METADATA}",),
        write=write_imagefolder,
        uses=("media_root",),
    ),
    ExportFormat(
        name="kohya",
        write=write_kohya,
        uses=("media_root", "sidecar", "repeats"),
    ),
    ExportFormat(
        name="sidecar",
        write=write_sidecars,
        uses=("media_root", "sidecar", "on_existing"),
    ),
    ExportFormat(
        name="coco",
        endings=(".coco.json",),
        write=write_coco,
    ),
    ExportFormat(
        name="yolo",
        write=write_yolo,
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
    options = options or ExportOptions()
    chosen = format_of(name, form, options.kinds)
    chosen.check(options)
    export = Export(inputs, name, options)
    chosen.write(export)
    return export.summary(chosen.name)


def format_of(output: str, form: str | None = None, kinds: KindTable | None = None) -> ExportFormat:
    """Returns the format with this name, or that of the name of an output. kinds: has those of
    outputs; None: those of all installed plugins. Raises ConfigError."""
    kinds = installed_kinds() if kinds is None else kinds
    named = _named(kinds)
    if form is not None:
        if form not in named:
            check_left_out(output, form)
            raise ConfigError(f"the format must be one of {', '.join(named)}, got {form[:40]!r}")
        return named[form]
    own = f"/{output.rstrip('/').lower()}"
    endings = {end: known.name for known in FORMATS for end in known.endings}
    ending = max(filter(own.endswith, (*kinds.outputs, *endings)), key=len, default=None)
    if ending in endings:
        return named[endings[ending]]
    found = known_format(output, None, kinds)
    if found is None:
        check_left_out(output, None)
        raise ConfigError(
            f"the name {output!r} says no format: end it in one of "
            f"{' '.join((*kinds.outputs, *endings))}, or give --format {' | '.join(named)}"
        )
    tell_who_writes(output, found, kinds)
    return named[found.spec.name]


def _named(kinds: KindTable) -> dict[str, ExportFormat]:
    """Returns all formats by their names."""
    found: dict[str, ExportFormat] = {}
    for spec in (own.spec for own in kinds.output_formats):
        own = ExportFormat(
            name=spec.name,
            write=partial(write_output, form=spec.name),
            uses=spec.options,
        )
        found.setdefault(spec.name, own)
    return found | {own.name: own for own in FORMATS}
