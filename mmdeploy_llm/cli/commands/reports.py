"""The command report: one page over several outputs of batches."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from mmdeploy_llm.cli.engines import previews_of
from mmdeploy_llm.cli.options.groups import with_groups
from mmdeploy_llm.cli.options.missing import check_outputs
from mmdeploy_llm.cli.options.model import Engine, Model
from mmdeploy_llm.cli.options.providers import ProviderOptions
from mmdeploy_llm.cli.options.values import engine_options
from mmdeploy_llm.errors import ConfigError

REPORT_EPILOG = """\b
An output is a JSONL file, a folder of Parquet files or WebDataset tars that a
batch has written, one of these files alone, or a URL; formats may be mixed.
Totals are those of all outputs together. An item that several outputs have,
by its id, counts once: the output that was written last wins. Texts that were
corrected on a page are taken from the file that it saved, named with the rest.

\b
Outputs whose run has not done all of its items, and shards of which no output
was named, are listed on the page and here.

\b
Examples:
  mmdeploy-llm report answers-*.jsonl -o answers.html
  mmdeploy-llm report shard1.parquet shard2.parquet rest.jsonl -o all.html
  mmdeploy-llm report s3://bucket/captions.tar -o captions.html

\b
Pictures are read from the files that the outputs name, within the limits of
the engine: --engine 'allowed_media_root=photos' confines them to a folder.

\b
Exit codes: 0 the page is written, 2 an output cannot be read or the page not
written, 3 an output changed while it was read."""

Outputs = Annotated[
    list[str],
    typer.Argument(metavar="PARTS", help="Outputs of batches: files, folders, globs, URLs."),
]
Page = Annotated[Path, typer.Option("--output", "-o", help="The HTML page.")]


@with_groups
def report(
    ctx: typer.Context,
    parts: Outputs,
    output: Page = Path("report.html"),
    model: Model = "shapes-vl",
    engine: Engine = None,
    *,
    providers: ProviderOptions,
) -> None:
    """Write one HTML report of several outputs, such as the shards of a run.

    --model is the one whose frames of videos are shown."""
    check_outputs(parts, "name outputs of batches")
    options = engine_options(ctx, engine, **providers.to_engine())
    from mmdeploy_llm.batch.report.page import EMBEDDED_CARDS, MAX_CARDS, merged_head, write_report
    from mmdeploy_llm.batch.report.previews import roots_of
    from mmdeploy_llm.batch.report.target import check_page
    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.data.outputs.opening.merged import MergedOutputs
    from mmdeploy_llm.data.records.outcome import counted

    check_page(output)
    merged = MergedOutputs(expanded(parts), providers.kinds(ctx.obj))
    previews = previews_of(model, options)
    num_shown = min(len(merged.index), MAX_CARDS)
    write_report(
        output,
        merged.records(MAX_CARDS),
        merged_head(merged),
        merged.index,
        previews,
        num_shown=num_shown,
        rules=previews.rules if num_shown > EMBEDDED_CARDS else "",
        roots=roots_of(*merged.sinks),
    )
    for each in merged.outputs:
        lacking = [f"{each.num_failed} failed", *counted(each.outcomes)]
        words = f"{each.label}: {each.num_items} items, {', '.join(lacking)}"
        typer.echo(printable(words))
    for words in merged.notes:
        typer.echo(printable(words))
    for name, words in merged.missing().items():
        typer.echo(printable(f"incomplete: {name}: {words}"))
    lacking = [f"{merged.index.num_failed} failed", *counted(merged.index.outcomes)]
    typer.echo(
        printable(
            f"together: {len(merged.index)} items, {', '.join(lacking)}, "
            f"{merged.index.num_output_tokens} generated tokens\nreport: {output}"
        )
    )


def expanded(parts: Iterable[str]) -> list[str]:
    """Returns the outputs with the files and folders that globs name. Raises ConfigError for a glob
    that names none."""
    from mmdeploy_llm.data.rows.names import expand_glob, is_url, natural_key

    found: list[str] = []
    for part in parts:
        if is_url(part) or os.path.lexists(part) or not glob.has_magic(part):
            found.append(part)
            continue
        names = sorted(expand_glob(part), key=natural_key)
        if not names:
            raise ConfigError(f"no output fits {part!r}")
        found += names
    return found
