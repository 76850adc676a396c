"""The command export: records of batches in other formats."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmdeploy_llm.cli.exits import SOME_FAILED
from mmdeploy_llm.cli.options.groups import Given, Rows, with_groups
from mmdeploy_llm.cli.options.missing import check_outputs
from mmdeploy_llm.cli.options.providers import ProviderOptions
from mmdeploy_llm.data.outputs.sidecars.arguments import SidecarArguments

if TYPE_CHECKING:
    from mmdeploy_llm.data.outputs.exports.export import ExportSummary

EXPORT_EPILOG = """\b
Examples:
  mmdeploy-llm export captions.jsonl -o captions.parquet
  mmdeploy-llm export captions.jsonl -o lora --format kohya --trigger ohwx
  mmdeploy-llm export shard-*.tar -o good.csv --outcome ok,truncated
  mmdeploy-llm export captions.jsonl captions.edited.jsonl -o corrected.csv

\b
Formats, by the ending of --output or by --format:
  jsonl        records, one line of JSON each
  csv          a table: a row for each record
  openai       responses of OpenAI's Batch API, one line of JSON each
  parquet      a folder of Parquet files, a row for each record
  webdataset   a folder of tars (NAME.tar), each answer beside its picture
  npy          a folder of arrays of numpy, a vector for each record
  lance        a Lance dataset, a row with a vector for each record
  imagefolder  a folder with pictures and a metadata.jsonl in data/train; with
               an --output that ends in /metadata.jsonl only that, beside the
               pictures
  kohya        a folder REPEATS_TRIGGER of pictures and captions
  sidecar      a text beside each picture beneath the folder --output
  coco         one file NAME.coco.json with the boxes of --boxes
  yolo         these boxes in a folder of labels/ and classes.txt

\b
Several outputs become one: an item that several have counts once, the newest.
Texts that were corrected on the page of a report are taken from the file that
it saved, named with the output.
Each record is written, or left out for a reason that is told.

\b
Exit codes: 0 each record is written, or has no answer or outcome that is
wanted; 1 records lack what the format needs, or none is written; 2 an output
cannot be read or written; 3 an output changed while it was read."""

ADVICE = (
    "to write them too: --media-root FOLDER says where relative paths of pictures begin; a picture "
    "inside a corpus has no file, and of the outputs only tars (batch -o NAME.tar) hold it"
)

Inputs = Annotated[
    list[str], typer.Argument(metavar="PART", help="Outputs of batches: files, folders, URLs.")
]
Target = Annotated[
    str, typer.Option("--output", "-o", metavar="NAME", help="The file or folder to write.")
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        "--output-format",
        metavar="FORMAT",
        help="The format.  [default: by the ending of --output]",
    ),
]
Outcomes = Annotated[
    str | None,
    typer.Option(
        metavar="WORDS",
        help="Only records of these outcomes: ok, truncated, malformed, repetition, empty, "
        "failed; with commas.  [default: all]",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")]
MediaRoot = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="The folder in which the batch ran: relative paths of pictures begin there.  "
        "[default: this one]",
    ),
]
PartItems = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Items in a part, where the format has parts."),
]
Repeats = Annotated[
    int,
    typer.Option(min=1, metavar="N", help="Of kohya: how often an epoch shows each picture."),
]


@with_groups
def export(
    ctx: typer.Context,
    parts: Inputs,
    *,
    output: Target,
    format: Format = None,
    outcome: Outcomes = None,
    overwrite: Overwrite = False,
    media_root: MediaRoot = None,
    part_items: PartItems = None,
    repeats: Repeats = 10,
    sidecars: Annotated[Given, Rows(SidecarArguments, title="Output")],
    providers: ProviderOptions,
) -> None:
    """Write the records of batches in another format: tables, tars, training sets."""
    check_outputs(parts, "name outputs of batches")
    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.data.outputs.exports.export import ExportOptions
    from mmdeploy_llm.data.outputs.exports.formats import export_records, format_of
    from mmdeploy_llm.data.outputs.sidecars.options import DEFAULT_SUFFIX, SidecarOptions

    kinds = providers.kinds(ctx.obj)
    chosen = format_of(output, format, kinds)
    given = {"sidecar": DEFAULT_SUFFIX, **sidecars}
    options = ExportOptions(
        outcomes=None if outcome is None else frozenset(map(str.strip, outcome.split(","))),
        media_root=media_root,
        part_items=part_items,
        is_overwritten=overwrite,
        sidecar=SidecarOptions.given(given) or SidecarOptions(),
        repeats=repeats,
        kinds=kinds,
    )
    summary = export_records(parts, output, chosen.name, options)
    for line in lines_of(summary):
        typer.echo(printable(line))
    if summary.num_lost and "media_root" in chosen.uses:
        typer.echo(ADVICE)
    if summary.num_lost or (summary.num_in and not summary.num_out):
        raise typer.Exit(SOME_FAILED)


def lines_of(summary: ExportSummary) -> list[str]:
    """Returns what the program prints at the end."""
    lines = [
        f"{summary.num_in} records in, {summary.num_out} written, {summary.num_left_out} left out",
        *(f"  {num} left out: {reason}" for reason, num in summary.left_out.most_common()),
        *summary.notes,
        f"{summary.format}: {summary.output}",
    ]
    return lines
