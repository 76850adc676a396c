"""The commands caption and batch, which share one implementation for different inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdeploy_llm.command_options.columns import ColumnChoices
from mmdeploy_llm.command_options.desk import DeskOptions
from mmdeploy_llm.command_options.groups import with_groups
from mmdeploy_llm.command_options.output import Output
from mmdeploy_llm.command_options.values import MANY_MEDIA, sampling_params
from mmdeploy_llm.errors import ConfigError

from .jobs import save_job
from .running import run_and_report, show_estimate
from .shards import shard_names

if TYPE_CHECKING:
    from mmdeploy_llm.batch.job import BatchSettings

Paths = Annotated[
    list[str], typer.Argument(metavar="PATH", help="Images, videos, their folders, or globs.")
]
Input = Annotated[
    str,
    typer.Argument(
        metavar="INPUT",
        help="A folder of images and videos, or a corpus. Corpora: JSONL, CSV, TSV, Parquet, "
        "Arrow, tar (WebDataset) or Lance; a file, folder, glob, pattern such as '{000..099}.tar' "
        "or URL; or hf://datasets/OWNER/NAME.",
    ),
]


@with_groups
def caption(
    ctx: typer.Context,
    paths: Paths,
    *,
    desk: DeskOptions,
    output: Output = "captions.jsonl",
) -> None:
    """Caption images and videos; write JSONL and an HTML report.

    Each caption is appended to the JSONL file as soon as it is finished. An image that cannot be
    read gets a line with its error and does not affect the others."""
    from mmdeploy_llm.batch.job import plan_source
    from mmdeploy_llm.batch.sources import open_files

    desk, output, page = named(desk, output, page_beside(output))
    options = desk.llm_options(ctx)
    settings = batch_settings(ctx, desk, options)
    source = open_files(
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
    if desk.estimate.estimate is not None:
        return show_estimate(source, settings, desk, options, page)
    job = plan_source(source, output, settings)
    save_job(ctx, desk.job.save_job)
    run_and_report(job, desk, options, page, is_caption=True)


@with_groups
def batch(
    ctx: typer.Context,
    input: Input,
    *,
    desk: DeskOptions,
    output: Output,
    columns: ColumnChoices,
) -> None:
    """Answer every prompt of a file, or a question about each item of a corpus.

    Results are appended to the output as they finish. Sampling options on the command line are
    defaults; a line's own "sampling_params" win."""
    from mmdeploy_llm.batch.job import plan_batch, source_of

    desk, output, page = named(desk, output, None)
    options = desk.llm_options(ctx, limit_mm_per_prompt=MANY_MEDIA)
    settings = batch_settings(ctx, desk, options, **columns.to_settings())
    if desk.estimate.estimate is not None:
        return show_estimate(source_of(input, settings), settings, desk, options, page)
    job = plan_batch(input, output, settings)
    if job.source.about:
        typer.echo(job.source.about, err=True)
    save_job(ctx, desk.job.save_job)
    run_and_report(job, desk, options, page)


def named(desk: DeskOptions, output: str, page: str | None) -> tuple[DeskOptions, str, str | None]:
    """Returns the options, the output and the report of this process, see shard_names. page: the
    report without --report. Raises ConfigError."""
    shown, chosen = desk.shown, desk.selection
    if shown.no_report and shown.report is not None:
        raise ConfigError("--report and --no-report contradict each other; give one of them")
    page = None if shown.no_report else page if shown.report is None else str(shown.report)
    shard, output, page = shard_names(chosen.shard, output, page)
    return replace(desk, selection=replace(chosen, shard=shard)), output, page


def batch_settings(
    ctx: typer.Context, desk: DeskOptions, engine: Mapping[str, Any], **more: Any
) -> BatchSettings:
    """Builds the settings of a run. engine: options of LLM(). more: further fields. Raises
    ConfigError for options that contradict each other."""
    from mmdeploy_llm.batch.engine import describe_engine
    from mmdeploy_llm.batch.job import BatchSettings
    from mmdeploy_llm.config import EngineConfig
    from mmdeploy_llm.datasets.rows import MAX_CELL_BYTES
    from mmdeploy_llm.finding.options import with_reader
    from mmdeploy_llm.startup.media import open_reader

    config = EngineConfig.from_options(desk.model.model, engine)  # wrong ones are told first
    if desk.effort.ray is not None:
        check_cluster(ctx)
    settings = BatchSettings(
        sampling_params=sampling_params(desk.to_sampling()),
        max_media_bytes=engine.get("max_media_bytes", MAX_CELL_BYTES),
        allowed_media_root=engine.get("allowed_media_root"),
        describe_engine=lambda: describe_engine(config),
        **desk.to_settings(),
        **more,
    )
    return with_reader(settings, lambda: open_reader(config))


def check_cluster(ctx: typer.Context) -> None:
    """Raises ConfigError when the command line says how often engines of this process are started
    again."""
    source = ctx.get_parameter_source("engine_restarts")
    if source is not None and source.name == "COMMANDLINE":
        raise ConfigError(
            "--engine-restarts is for engines of this process; a Ray cluster starts its engines "
            "again by itself: leave it out with --ray"
        )


def page_beside(output: str) -> str:
    """Returns the default name of a report: that of the output, of a URL in the working folder."""
    name = output.rstrip("/")
    local = name.rpartition("/")[2] if "://" in name else name
    return str(Path(local).with_suffix(".html"))
