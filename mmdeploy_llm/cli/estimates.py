"""--estimate of the commands caption and batch: what a run will take, before it begins."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmdeploy_llm.errors import ConfigError

from .engines import open_llm, open_media, open_reader

if TYPE_CHECKING:
    from mmdeploy_llm.batch.job import BatchSettings
    from mmdeploy_llm.batch.sources import Source
    from mmdeploy_llm.command_options.desk import DeskOptions
    from mmdeploy_llm.estimate.result import Estimate

SUFFIX = ".estimate.html"


def show_estimate(
    source: Source,
    settings: BatchSettings,
    desk: DeskOptions,
    options: Mapping[str, Any],
    page: str | None,
) -> None:
    """Answers the items of --estimate, prints their answers and what all items will take, and
    writes a page of them beside the report, if that is wanted. Raises ConfigError with --ray."""
    from mmdeploy_llm.estimate.estimate import estimate
    from mmdeploy_llm.report.target import check_page

    from .terminal import caption_table, make_console, printable

    if desk.effort.ray is not None:
        raise ConfigError("--estimate measures an engine of this process; leave out --ray")
    target = None if page is None else Path(page).with_suffix(SUFFIX)
    if target is not None:
        check_page(target)
    num_items, seed = desk.estimate.estimate, desk.estimate.estimate_seed
    assert num_items is not None, "--estimate was not given"
    with open_llm(desk.model.model, options) as llm:
        found = estimate(source, settings.selection, llm, num_items=num_items, seed=seed)
    make_console().print(caption_table(found.records))
    typer.echo()
    lines = found.lines()
    width = max(map(len, lines)) + 2
    for label, value in lines.items():
        typer.echo(printable(f"{label + ':':<{width}}{value}"))
    if target is not None:
        _write(target, found, desk.model.model, settings, options)
        typer.echo(printable(f"{'report:':<{width}}{target}"))


def _write(
    target: Path,
    found: Estimate,
    model: str,
    settings: BatchSettings,
    options: Mapping[str, Any],
) -> None:
    """Writes the page of the items that were answered."""
    from mmdeploy_llm.report.page import ReportHead, write_report
    from mmdeploy_llm.report.previews import FilePreviews
    from mmdeploy_llm.sinks.scan import RecordIndex

    index = RecordIndex()
    for place, record in enumerate(found.records):
        index.add(record, place, 0)
    head = ReportHead(
        model=model,
        prompt=settings.question,
        created=f"{datetime.datetime.now():%d %B %Y, %H:%M}",
        version=metadata.version("mmdeploy-llm"),
        unit=found.unit,
        facts=found.lines(),
    )
    previews = FilePreviews(lambda: open_reader(model, options), lambda: open_media(model, options))
    write_report(target, found.records, head, index, previews, num_shown=len(found.records))
