"""The commands caption and batch, which share one implementation for different inputs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mmdeploy_llm.cli.engines import say_what_runs
from mmdeploy_llm.cli.options.columns import ColumnChoices
from mmdeploy_llm.cli.options.groups import is_given, with_groups
from mmdeploy_llm.cli.options.job_file import save_job
from mmdeploy_llm.cli.options.missing import check_corpus, check_media
from mmdeploy_llm.cli.options.output import Output
from mmdeploy_llm.cli.options.selection import listed_files
from mmdeploy_llm.cli.options.shared import DeskOptions, EstimateDesk, RunDesk
from mmdeploy_llm.cli.options.suggested import Demo, choose_model
from mmdeploy_llm.cli.options.values import MANY_MEDIA, sampling_params
from mmdeploy_llm.cli.options.vectors import EmbedOptions
from mmdeploy_llm.cli.running import After, nothing_more, run_and_report, show_estimate
from mmdeploy_llm.errors import ConfigError

from .plugins import LOAD_PLUGINS
from .shards import shard_names

if TYPE_CHECKING:
    from mmdeploy_llm.batch.settings import BatchJob, BatchSettings
    from mmdeploy_llm.batch.sources import Source
    from mmdeploy_llm.batch.summary import BatchSummary
    from mmdeploy_llm.cli.options.reading import ReadOptions
    from mmdeploy_llm.cli.options.vectors import EmbedOptions

Desk = TypeVar("Desk", bound="DeskOptions | EmbedOptions | ReadOptions")
Paths = Annotated[
    list[str] | None,
    typer.Argument(metavar="PATH", help="Images, videos and other media, their folders, or globs."),
]
CORPORA = (
    "Corpora: JSONL, CSV, TSV, Parquet, Arrow, tar (WebDataset) or Lance; a file, folder, glob, "
    "pattern such as '{000..099}.tar' or URL; or hf://datasets/OWNER/NAME."
)
Input = Annotated[
    str | None,
    typer.Argument(metavar="INPUT", help=f"A folder of media, or a corpus. {CORPORA}"),
]
Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="INPUT", help=f"Media, their folders or globs, several too; or a corpus. {CORPORA}"
    ),
]


@with_groups
def caption(
    ctx: typer.Context,
    paths: Paths = None,
    *,
    desk: DeskOptions,
    output: Output = "captions.jsonl",
    demo: Demo = False,
) -> None:
    """Caption images, videos and other media; write JSONL and an HTML report.

    Each caption is appended to the JSONL file as soon as it is finished. A file that cannot be
    read gets a line with its error and does not affect the others."""
    given = files_of(desk, *(paths or []))
    check_media(given)
    desk = with_model(ctx, desk, given, is_demo=demo)
    desk, output, page = named(desk, output, page_beside(output))
    say = partial(say_run_of, desk, given, output, page)
    say()  # before the options of the engine are imported
    options = desk.llm_options(ctx, limit_mm_per_prompt=MANY_MEDIA)  # of the parts of a document
    from mmdeploy_llm.batch.job import open_output, plan_source
    from mmdeploy_llm.batch.options import option_settings

    settings = batch_settings(ctx, desk, options, option_settings(desk.to_batch()))
    sink = open_output(output, settings)  # a wrong format is told before torch is imported
    source = source_of_files(given, settings)
    if desk.estimate.estimate is not None:
        say(is_checked=True)
        return show_estimate(source, sink, settings, desk, options, page)
    job = plan_source(source, sink, settings)
    say(is_checked=True)
    start(ctx, job, desk, options, page, is_caption=True)


@with_groups
def batch(
    ctx: typer.Context,
    input: Input = None,
    *,
    desk: DeskOptions,
    output: Output,
    columns: ColumnChoices,
    demo: Demo = False,
) -> None:
    """Answer every prompt of a file, or a question about each item of a corpus.

    Results are appended to the output as they finish. Sampling options on the command line are
    defaults; a line's own "sampling_params" win."""
    run_input(ctx, input, desk, output, columns, is_demo=demo)


def run_input(
    ctx: typer.Context,
    input: str | None,
    desk: DeskOptions | EmbedOptions,
    output: str,
    columns: ColumnChoices,
    after: After = nothing_more,
    paths: Sequence[str] = (),
    *,
    is_demo: bool,
) -> None:
    """Runs a corpus, or files: `paths`, and those that --files-from lists; see start. is_demo: see
    choose_model."""
    has_files = desk.selection.files_from is not None or bool(paths)
    if (input is None) != has_files:
        raise ConfigError("give INPUT, or a list of files with --files-from: one of them")
    check_corpus(input)
    named_inputs = files_of(desk, *paths) if input is None else [input]
    desk = with_model(ctx, desk, named_inputs, is_demo=is_demo)
    desk, output, page = named(desk, output, None)
    say = partial(say_run_of, desk, named_inputs, output, page)
    say()
    options = desk.llm_options(ctx, limit_mm_per_prompt=MANY_MEDIA)
    from mmdeploy_llm.batch.job import open_output, plan_batch, plan_source, source_of
    from mmdeploy_llm.batch.options import option_settings

    fields = option_settings({**desk.to_batch(), **columns.to_batch()})
    settings = batch_settings(ctx, desk, options, fields)
    sink = open_output(output, settings)  # a wrong format is told before torch is imported
    files = source_of_files(named_inputs, settings) if input is None else None
    given = input or ""
    if desk.estimate.estimate is not None:
        source = files or source_of(given, settings)
        say(is_checked=True)
        return show_estimate(source, sink, settings, desk, options, page)
    job = plan_source(files, sink, settings) if files else plan_batch(given, sink, settings)
    say(is_checked=True)
    start(ctx, job, desk, options, page, after=after)


def say_run_of(
    desk: EstimateDesk,
    paths: Iterable[str],
    output: str,
    page: str | None,
    *,
    is_checked: bool = False,
) -> None:
    """Says what starts, see say_what_runs; an estimate writes no results."""
    places = () if desk.estimate.estimate is not None else filter(None, (output, page))
    say_what_runs(
        desk.model.model,
        paths,
        places,
        purpose=desk.purpose,
        is_checked=is_checked,
        limit=desk.selection.items.get("limit"),
        is_resumed=desk.resume.is_resumed,
    )


def with_model(ctx: typer.Context, desk: Desk, paths: Iterable[str], *, is_demo: bool) -> Desk:
    """Returns the options with the model of the run, see choose_model."""
    model = choose_model(ctx, desk.model.model, paths, desk.purpose, is_demo=is_demo)
    return replace(desk, model=replace(desk.model, model=model))


def is_medium(ctx: typer.Context, path: str, desk: EmbedOptions) -> bool:
    """Returns whether a path is a file that a plugin knows by its name as media."""
    if not os.path.isfile(path):
        return False
    desk.llm_options(ctx)  # a wrong one is told before the plugins are imported
    from mmdeploy_llm.data.rows.names import is_media_name

    return is_media_name(path, ctx.meta[LOAD_PLUGINS]().kinds)


def files_of(desk: DeskOptions | EmbedOptions, *paths: str) -> list[str]:
    """Returns the paths that the command line names and lists. Raises ConfigError for none."""
    listed = desk.selection.files_from
    found = [*paths, *([] if listed is None else listed_files(listed))]
    if not found:
        raise ConfigError("nothing to read: give PATHs, or a list of files with --files-from")
    return found


def source_of_files(paths: list[str], settings: BatchSettings) -> Source:
    """Opens files, folders and globs. Raises ConfigError as open_files does."""
    from mmdeploy_llm.batch.sources import open_files

    if settings.columns.values():
        raise ConfigError("files have no columns; columns are for a corpus")
    return open_files(
        paths,
        settings.sampling_params,
        settings.selection,
        is_recursive=settings.is_recursive,
        sidecar=settings.sidecar,
        finding=settings.finding,
        question=settings.question,
        asks=settings.asks,
        template_kwargs=settings.chat_template_kwargs,
        system=settings.system,
    )


def start(
    ctx: typer.Context,
    job: BatchJob,
    desk: RunDesk,
    options: Mapping[str, Any],
    page: str | None,
    *,
    is_caption: bool = False,
    after: After = nothing_more,
) -> None:
    """Tells what a job is about, keeps the command if that is wanted, and runs it."""
    if job.source.about:
        typer.echo(job.source.about, err=True)
    save_job(ctx, desk.job.save_job)
    run_and_report(job, desk, options, page, is_caption=is_caption, after=after)


def named(desk: Desk, output: str, page: str | None) -> tuple[Desk, str, str | None]:
    """Returns the options, the output and the report of this process, see shard_names. page: the
    report without --report. Raises ConfigError."""
    shown = desk.shown
    if shown.no_report and shown.report is not None:
        raise ConfigError("--report and --no-report contradict each other; give one of them")
    page = None if shown.no_report else page if shown.report is None else str(shown.report)
    return of_shard(desk, output, page)


def of_shard(desk: Desk, output: str, page: str | None) -> tuple[Desk, str, str | None]:
    """Returns the same of this process, of several that share the input, see shard_names."""
    shard, output, page = shard_names(desk.selection.items.get("shard"), output, page)
    return replace(desk, selection=desk.selection.of_shard(shard)), output, page


def batch_settings(
    ctx: typer.Context, desk: RunDesk, engine: Mapping[str, Any], fields: Mapping[str, Any]
) -> BatchSettings:
    """Builds the settings of a run. engine: options of LLM(). fields: of the options of the run.
    Raises ConfigError for options that contradict each other."""
    from mmdeploy_llm.batch.documents.sources import Sources
    from mmdeploy_llm.batch.engine import describe_engine
    from mmdeploy_llm.batch.settings import BatchSettings
    from mmdeploy_llm.data.rows.rows import MAX_CELL_BYTES
    from mmdeploy_llm.engine.startup.kinds import accepted_kinds, known_kinds, usual_question
    from mmdeploy_llm.media.loading.reader import open_reader
    from mmdeploy_llm.values.options.config import EngineConfig

    config = EngineConfig.from_options(desk.model.model, engine)  # wrong ones are told first
    if desk.effort.ray is not None:
        check_cluster(ctx)
    settings = BatchSettings(
        sampling_params=sampling_params(desk.to_sampling()),
        max_media_bytes=engine.get("max_media_bytes", MAX_CELL_BYTES),
        allowed_media_root=engine.get("allowed_media_root"),
        describe_engine=lambda: describe_engine(config),
        **{**fields, **desk.to_settings()},
    )
    if settings.boxes and desk.effort.ray is not None:
        raise ConfigError("--boxes are read by an engine of this process; leave out --ray")
    if settings.boxes:
        from mmdeploy_llm.engine.startup.media import check_boxes  # which imports torch

        check_boxes(config, settings.sampling_params)
    sources = ctx.with_resource(Sources(config, settings.finding.pages))
    return settings.for_model(
        lambda: open_reader(config),
        known_kinds(config),
        lambda: accepted_kinds(config),
        sources.open,
        usual_question(config),
    )


def check_cluster(ctx: typer.Context) -> None:
    """Raises ConfigError when the command line says how often engines of this process are started
    again."""
    if is_given(ctx, "engine_restarts"):
        raise ConfigError(
            "--engine-restarts is for engines of this process; a Ray cluster starts its engines "
            "again by itself: leave it out with --ray"
        )


def page_beside(output: str) -> str:
    """Returns the default name of a report: that of the output, of a URL in the working folder."""
    name = output.rstrip("/")
    local = name.rpartition("/")[2] if "://" in name else name
    return str(Path(local).with_suffix(".html"))


@with_groups
def embed(
    ctx: typer.Context,
    inputs: Inputs = None,
    *,
    desk: EmbedOptions,
    output: Output = "vectors.parquet",
    columns: ColumnChoices,
    demo: Demo = False,
) -> None:
    """Make a vector of each item of a corpus, or of media and their folders, for `search` and
    `dedupe`.

    Vectors are appended to the output as they finish. An item that cannot be read gets a record
    with its error and does not affect the others."""
    given = inputs or []
    first = given[0] if len(given) == 1 else None
    paths = given if first is None or is_medium(ctx, first, desk) else []
    check_media(paths)
    corpus = None if paths else first
    run_input(ctx, corpus, desk, output, columns, _finished, paths, is_demo=demo)


def _finished(summary: BatchSummary) -> Iterable[str]:
    from mmdeploy_llm.data.vectors.written import finish

    return finish(summary.sink)
