"""The command read: documents, page by page, as Markdown."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from mmdeploy_llm.cli.options.batch_help import EXIT_CODES
from mmdeploy_llm.cli.options.groups import is_given, with_groups
from mmdeploy_llm.cli.options.missing import check_media
from mmdeploy_llm.cli.options.output import Output
from mmdeploy_llm.cli.options.reading import ReadOptions
from mmdeploy_llm.cli.options.selection import listed_files
from mmdeploy_llm.cli.options.suggested import Demo
from mmdeploy_llm.cli.running import show_estimate
from mmdeploy_llm.errors import ConfigError

from .batches import batch_settings, of_shard, say_run_of, start, with_model

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
    demo: Demo = False,
) -> None:
    """Read documents page by page; write Markdown.

    A page is an item: it has a record of its own, is resumed alone and fails alone."""
    listed = desk.selection.files_from
    paths = [*(documents or []), *([] if listed is None else listed_files(listed))]
    if not paths:
        raise ConfigError("nothing to read: give DOCS, or a list of files with --files-from")
    check_media(paths)
    desk = with_model(ctx, desk, paths, is_demo=demo)
    report = desk.shown.report
    desk, output, page = of_shard(desk, output, None if report is None else str(report))
    say = partial(say_run_of, desk, paths, output, page)
    say()
    options = desk.llm_options(ctx)
    from mmdeploy_llm.batch.documents.reading.arguments import read_arguments
    from mmdeploy_llm.batch.documents.reading.plan import find_reading, open_reader
    from mmdeploy_llm.batch.job import open_output
    from mmdeploy_llm.values.options.config import EngineConfig

    wish, fields = read_arguments(desk.to_batch(), desk.written.markdown)
    config = EngineConfig.from_options(desk.model.model, options)
    settings = batch_settings(ctx, desk, options, fields)
    (sink := open_output(output, settings)).check(settings.mode)  # before torch is imported
    say(is_checked=True)
    with (reader := open_reader(config, wish)).documents:
        if reader.image_tokens is not None and not is_given(ctx, "image_tokens"):
            options = desk.llm_options(ctx, image_tokens=reader.image_tokens)
            settings = batch_settings(ctx, desk, options, fields)
        found = find_reading(paths, settings, reader, wish)
        if desk.estimate.estimate is not None:
            return show_estimate(found.source, sink, found.settings, desk, options, page)
        reading = found.plan(sink)
        start(ctx, reading.job, desk, options, page, after=reading.write)
