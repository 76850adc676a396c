"""Runs a job of the commands caption and batch, and says how it ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mmdeploy_llm.cli.options.suggested import is_demonstration, limits_of
from mmdeploy_llm.cli.terminal.interrupts import interrupted_code
from mmdeploy_llm.errors import ConfigError, MMDeployLLMError

from .engines import open_answerer, open_llm, previews_of
from .exits import SOME_FAILED, SOME_LACKING, STOPPED

if TYPE_CHECKING:
    from mmdeploy_llm.batch.report.whole import RunReport
    from mmdeploy_llm.batch.settings import BatchJob, BatchSettings
    from mmdeploy_llm.batch.sources import Source
    from mmdeploy_llm.batch.summary import BatchSummary
    from mmdeploy_llm.cli.options.shared import EstimateDesk, RunDesk
    from mmdeploy_llm.data.outputs.base import Sink


# Does what is to be done with the records of a run, and returns what is told of it.
After = Callable[["BatchSummary"], Iterable[str]]


def nothing_more(summary: BatchSummary) -> tuple[str, ...]:
    """Does nothing with the records of a run."""
    return ()


def run_and_report(
    job: BatchJob,
    desk: RunDesk,
    options: Mapping[str, Any],
    page: str | None,
    *,
    is_caption: bool = False,
    after: After = nothing_more,
) -> None:
    """Runs a job, writes its report, prints a summary and exits with the job's exit code. options:
    of LLM(). page: name of the report, if one is wanted. after: see After."""
    from mmdeploy_llm.batch.job import run_batch
    from mmdeploy_llm.cli.terminal import output as terminal
    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.data.records.files import OutputLostError, OutputWriteError

    model = desk.model.model
    report = None if page is None else _report_of(job, desk, options, page, is_caption=is_caption)
    run = partial(run_batch, job) if report is None else report.run
    try:
        summary = run(lambda: open_answerer(model, options, desk.effort.ray))
    except (OutputLostError, OutputWriteError):  # says where the finished items are
        raise
    except Exception:
        if job.sink.exists():
            typer.echo("finished items are saved; --resume continues this run", err=True)
        raise
    fault = None if report is None else _write(report, summary)
    page = page if summary.num_records and fault is None else None
    if desk.shown.table:
        terminal.print_table(terminal.caption_table(list(summary.records())))
        typer.echo()
    has_vectors = job.settings.asks.wanted is not None
    done = "captioned" if is_caption else "embedded" if has_vectors else "done"
    typer.echo(terminal.batch_summary(summary, done=done))
    for line in after(summary):
        typer.echo(printable(line))
    what = "captions:" if is_caption else "vectors: " if has_vectors else "results: "
    typer.echo(printable(f"{what} {job.sink.name}" + (f"\nreport:   {page}" if page else "")))
    if is_demonstration(model):
        typer.echo(limits_of(model, desk.purpose))
    if fault is not None:
        raise fault
    end_with_exit_code(summary)


def _report_of(
    job: BatchJob, desk: RunDesk, options: Mapping[str, Any], page: str, *, is_caption: bool
) -> RunReport:
    """Returns the report of a run, and says where it is served meanwhile."""
    from mmdeploy_llm.batch.report.whole import ReportOptions, RunReport

    model = desk.model.model
    limits = {"note": limits_of(model, desk.purpose)} if is_demonstration(model) else {}
    shown = ReportOptions(
        model=model,
        about={**limits, **options},
        is_caption=is_caption,
        live_port=desk.shown.port,
    )
    report = RunReport(job, Path(page), previews_of(model, options), shown)
    if report.url is not None:
        typer.echo(f"the report, while the run goes on: {report.url}", err=True)
    return report


def _write(report: RunReport, summary: BatchSummary) -> Exception | None:
    """Writes a report; returns the error, if there is one: the summary is told first."""
    try:
        report.write(summary)
    except (MMDeployLLMError, OSError) as error:
        return error
    return None


def show_estimate(
    source: Source,
    sink: Sink,
    settings: BatchSettings,
    desk: EstimateDesk,
    options: Mapping[str, Any],
    page: str | None,
) -> None:
    """Answers the items of --estimate, prints their answers and what all items will take, with
    --resume those that are left, and writes a page of them beside the report, if that is wanted.
    Raises ConfigError with --ray."""
    from mmdeploy_llm.batch.estimate.estimate import LeftSource, estimate
    from mmdeploy_llm.batch.estimate.page import beside, write_page
    from mmdeploy_llm.batch.job import plan_source
    from mmdeploy_llm.cli.terminal.letters import printable
    from mmdeploy_llm.cli.terminal.output import caption_table, print_table

    if desk.effort.ray is not None:
        raise ConfigError("--estimate measures an engine of this process; leave out --ray")
    target, model, draw = beside(page), desk.model.model, desk.estimate.draw
    if source.about:
        typer.echo(source.about, err=True)
    if settings.mode == "resume":
        job = plan_source(source, sink, settings)
        if job.is_empty:
            typer.echo(f"nothing left to do: all {len(job.kept.index)} items have a result")
            return
        source = LeftSource(job)
    with open_llm(model, options) as llm:
        found = estimate(source, settings.selection, llm, **draw)
    print_table(caption_table(found.records))
    typer.echo(printable(f"\n{found}"))
    if target is not None:
        write_page(target, found, model, settings, previews_of(model, options))
        typer.echo(printable(f"report: {target}"))


def end_with_exit_code(summary: BatchSummary) -> None:
    """Prints how to continue and exits with an error code, unless every item has its answer."""
    left = "some" if summary.num_left is None else str(summary.num_left)
    if summary.ending == "interrupted":
        typer.echo(f"stopped with {left} left; the same command with --resume does them", err=True)
        raise typer.Exit(interrupted_code())
    if summary.ending == "max_failures":
        typer.echo(
            f"stopped by --max-failures with {left} left; the same command with --resume continues",
            err=True,
        )
        raise typer.Exit(STOPPED)
    if summary.num_left:
        typer.echo(f"{left} left; the same command with --resume does them", err=True)
        raise typer.Exit(STOPPED)
    if summary.num_failed:
        typer.echo(f"{summary.num_failed} failed: their lines say why, --resume retries them")
        raise typer.Exit(SOME_FAILED)
    if summary.sidecars is not None and summary.sidecars.num_failed:
        typer.echo(
            f"{summary.sidecars.num_failed} texts beside pictures could not be written; --resume "
            "writes those that are missing"
        )
        raise typer.Exit(SOME_FAILED)
    if summary.num_lacking:
        raise typer.Exit(SOME_LACKING)
