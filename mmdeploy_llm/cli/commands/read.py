"""The command read: documents, page by page, as Markdown."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from mmdeploy_llm.cli.options.batch_help import EXIT_CODES
from mmdeploy_llm.cli.options.groups import with_groups
from mmdeploy_llm.cli.options.missing import check_media
from mmdeploy_llm.cli.options.output import Output
from mmdeploy_llm.cli.options.reading import ReadOptions
from mmdeploy_llm.cli.options.selection import listed_files
from mmdeploy_llm.cli.running import show_estimate
from mmdeploy_llm.errors import ConfigError

from .batches import batch_settings, start
from .shards import shard_names

EPILOG = f"""\b
Examples:
  mmdeploy-llm read reports/ --markdown text/ --model models/acme-ocr
  mmdeploy-llm read scan.pdf --pages 1-5,-1 --dpi 150
  mmdeploy-llm read reports/ --markdown text/ --resume
  mmdeploy-llm read invoices/ --task table --tables markdown

{EXIT_CODES}"""

Paths = Annotated[
    list[str] | None,
    typer.Argument(metavar="DOCS", help="Documents such as PDF, pictures, their folders, globs."),
]


@with_groups
def read(
    ctx: typer.Context,
    documents: Paths = None,
    *,
    desk: ReadOptions,
    output: Output = "pages.jsonl",
) -> None:
    """Read documents page by page; write Markdown.

    A page is an item: it has a record of its own, is resumed alone and fails alone."""
    desk.written.check()
    listed = desk.selection.files_from
    paths = [*(documents or []), *([] if listed is None else listed_files(listed))]
    if not paths:
        raise ConfigError("nothing to read: give DOCS, or a list of files with --files-from")
    check_media(paths)
    options = desk.llm_options(ctx)
    from mmdeploy_llm.batch.documents.reading.plan import Wish, find_reading, open_reader
    from mmdeploy_llm.batch.job import open_output
    from mmdeploy_llm.values.options.config import EngineConfig

    report = desk.shown.report
    shard, output, page = shard_names(
        desk.selection.shard, output, None if report is None else str(report)
    )
    desk = replace(desk, selection=replace(desk.selection, shard=shard))
    wish = Wish(
        preset=desk.asking.preset,
        task=desk.asking.task,
        prompt=desk.asking.question(),
        tables=desk.written.tables,
        pages=desk.pages.pages,
        options=desk.pages.to_options(),
        sampling=desk.asking.values(),
        markdown=desk.written.markdown,
        is_marked=desk.written.running == "mark",
    )
    config = EngineConfig.from_options(desk.model.model, options)
    settings = batch_settings(ctx, desk, options)
    (sink := open_output(output, settings)).check(settings.mode)  # before torch is imported
    with (reader := open_reader(config, wish)).documents:
        given = ctx.get_parameter_source("image_tokens")
        if reader.image_tokens is not None and (given is None or given.name == "DEFAULT"):
            options = desk.llm_options(ctx, image_tokens=reader.image_tokens)
            settings = batch_settings(ctx, desk, options)
        found = find_reading(paths, settings, reader, wish)
        if desk.estimate.estimate is not None:
            return show_estimate(found.source, sink, found.settings, desk, options, page)
        reading = found.plan(sink)
        start(ctx, reading.job, desk, options, page, after=reading.write)
