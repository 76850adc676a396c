"""The commands caption and batch, which share one implementation for different inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmdeploy_llm.errors import ConfigError, MMDeployLLMError

from .columns import ColumnChoices
from .options import (
    INTERRUPTED,
    MANY_MEDIA,
    SOME_FAILED,
    SOME_LACKING,
    STOPPED,
    AnswerOptions,
    ModelOptions,
    Output,
    Recursive,
    RunOptions,
    Temperature,
    ToolParser,
    named_value,
    open_answerer,
    open_media,
    open_reader,
    output_mode,
    sampling_params,
    template_kwargs,
    with_groups,
)
from .shards import shard_names

if TYPE_CHECKING:
    from mmdeploy_llm.batch.job import BatchJob, BatchSettings
    from mmdeploy_llm.batch.summary import BatchSummary
    from mmdeploy_llm.records.configuration import Configuration

Paths = Annotated[list[str], typer.Argument(help="Images, videos, their folders, or globs.")]
Input = Annotated[
    str,
    typer.Argument(
        help="Folder of images and videos (subfolders included), or a corpus: JSONL, CSV, TSV, "
        "Parquet, Arrow, tar (WebDataset) or Lance; a file, folder, glob, pattern such as "
        "'{000..099}.tar' or URL; or hf://datasets/OWNER/NAME."
    ),
]
Question = Annotated[
    str | None,
    typer.Option(
        "--prompt",
        "-p",
        help="The question about each file; in `batch` also about each row of a corpus, with "
        "columns in it: 'Describe {title}.'  "
        '[default: "Describe the image." / "Describe the video."]',
    ),
]
PageBeside = Annotated[
    Path | None,
    typer.Option("--report", help="HTML report.  [default: the name of --output with .html]"),
]
Page = Annotated[Path | None, typer.Option("--report", help="Write an HTML report to this file.")]
Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Answer with engines on all machines of a Ray cluster: HOST:PORT, auto (the cluster "
        "of this machine) or local (a new one). Media paths must be readable on each of them.",
    ),
]
LineTemperature = Annotated[
    float | None,
    typer.Option(min=0.0, help="Randomness of sampling; 0 always picks the most probable token."),
]
Sampling = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE",
        help="Any other sampling parameter, such as top_p=0.9; may be repeated.",
    ),
]


@with_groups
def caption(
    ctx: typer.Context,
    paths: Paths,
    *,
    prompt: Question = None,
    output: Output = "captions.jsonl",
    report: PageBeside = None,
    no_report: Annotated[
        bool, typer.Option("--no-report", help="Do not write an HTML report.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Print a table of results at the end.")
    ] = False,
    recursive: Recursive = False,
    temperature: Temperature = 0.0,
    answer: AnswerOptions,
    model: ModelOptions,
    run: RunOptions,
) -> None:
    """Caption images and videos; write JSONL and an HTML report.

    Each caption is appended to the JSONL file as soon as it is finished. An image that cannot be
    read gets a line with its error and does not affect the others."""
    from mmdeploy_llm.batch.job import plan_source
    from mmdeploy_llm.batch.sources import open_files

    page = None if no_report else str(report or page_beside(output))
    run, output, page = shard_names(run, output, page)
    options = llm_options(ctx, model, run, answer)
    sampling = {"max_tokens": answer.max_tokens, "temperature": temperature}
    settings = batch_settings(run, answer, sampling, prompt, model.model, options)
    source = open_files(
        paths,
        settings.sampling_params,
        settings.selection,
        is_recursive=recursive,
        question=prompt,
        template_kwargs=settings.chat_template_kwargs,
    )
    job = plan_source(source, output, settings)
    run_and_report(job, model.model, options, page, is_caption=True, is_table_shown=table)


@with_groups
def batch(
    ctx: typer.Context,
    input: Input,
    output: Output,
    *,
    prompt: Question = None,
    columns: ColumnChoices,
    report: Page = None,
    temperature: LineTemperature = None,
    sampling: Sampling = None,
    tool_call_parser: ToolParser = "auto",
    ray: Ray = None,
    answer: AnswerOptions,
    model: ModelOptions,
    run: RunOptions,
) -> None:
    """Answer every prompt of a file, or a question about each item of a corpus.

    Results are appended to the output as they finish. Sampling options on the command line are
    defaults; a line's own "sampling_params" win."""
    from mmdeploy_llm.batch.job import plan_batch

    run, output, page = shard_names(run, output, None if report is None else str(report))
    more = dict(named_value("--sampling", text, "top_p=0.9") for text in sampling or [])
    given = {"max_tokens": answer.max_tokens, "temperature": temperature, **more}
    options = llm_options(
        ctx, model, run, answer, tool_call_parser=tool_call_parser, limit_mm_per_prompt=MANY_MEDIA
    )
    settings = batch_settings(run, answer, given, prompt, model.model, options)
    settings = replace(settings, columns=columns.chosen())
    if ray is not None:
        settings = replace(settings, engine_restarts=cluster_restarts(ctx))
    job = plan_batch(input, output, settings)
    if job.source.about:
        typer.echo(job.source.about, err=True)
    run_and_report(job, model.model, options, page, cluster=ray)


def cluster_restarts(ctx: typer.Context) -> int:
    """Returns 0: a cluster starts its engines again by itself. Raises ConfigError when the command
    line says otherwise."""
    source = ctx.get_parameter_source("engine_restarts")
    if source is not None and source.name == "COMMANDLINE":
        raise ConfigError(
            "--engine-restarts is for engines of this process; a Ray cluster starts its engines "
            "again by itself: leave it out with --ray"
        )
    return 0


def llm_options(
    ctx: typer.Context, model: ModelOptions, run: RunOptions, answer: AnswerOptions, **more: Any
) -> dict[str, Any]:
    """Returns the options of LLM()."""
    return model.llm_options(
        ctx,
        max_num_seqs=run.max_num_seqs,
        num_threads=run.num_threads,
        reasoning_parser=answer.reasoning_parser,
        **more,
    )


def batch_settings(
    run: RunOptions,
    answer: AnswerOptions,
    sampling: Mapping[str, Any],
    question: str | None,
    model: str,
    engine: Mapping[str, Any],
) -> BatchSettings:
    """Builds the settings of a run. sampling: parameters, without those that are None. engine:
    options of LLM(). Raises ConfigError for options that contradict each other."""
    from mmdeploy_llm.batch.job import BatchSettings
    from mmdeploy_llm.batch.options import OutputOptions, output_settings
    from mmdeploy_llm.datasets.rows import MAX_CELL_BYTES
    from mmdeploy_llm.records.outcome import Retried

    is_resumed = run.resume or run.resume_anyway
    retried = False if run.no_retry_failed else run.retry_failed
    if retried != "all" and not is_resumed:
        raise ConfigError(
            "--retry-failed WHICH and --no-retry-failed: each needs --resume; a new run has "
            "nothing to retry"
        )
    given = {name: value for name, value in sampling.items() if value is not None}
    return BatchSettings(
        mode=output_mode(run.overwrite, is_resumed),
        sampling_params=sampling_params(**given),
        chat_template_kwargs=template_kwargs(answer.thinking),
        question=question,
        max_media_bytes=engine.get("max_media_bytes", MAX_CELL_BYTES),
        allowed_media_root=engine.get("allowed_media_root"),
        retried=Retried.parse(retried),
        **output_settings({name: getattr(run, name) for name in OutputOptions.__annotations__}),
        is_any_config_kept=run.resume_anyway,
        describe_engine=lambda: describe_model(model, engine),
    )


def describe_model(model: str, options: Mapping[str, Any]) -> Configuration:
    """Returns what decides the answers of a model with these options of LLM()."""
    from mmdeploy_llm.batch.engine import describe_engine
    from mmdeploy_llm.config import EngineConfig

    return describe_engine(EngineConfig.from_options(model, options))


def page_beside(output: str) -> str:
    """Returns the default name of a report: that of the output, of a URL in the working folder."""
    name = output.rstrip("/")
    local = name.rpartition("/")[2] if "://" in name else name
    return str(Path(local).with_suffix(".html"))


def run_and_report(
    job: BatchJob,
    model: str,
    options: Mapping[str, Any],
    page: str | None,
    *,
    is_caption: bool = False,
    is_table_shown: bool = False,
    cluster: str | None = None,
) -> None:
    """Runs a job, writes its report, prints a summary and exits with the job's exit code. cluster:
    address of the Ray cluster that answers; None: this process does."""
    from mmdeploy_llm.batch.job import run_batch
    from mmdeploy_llm.records.files import OutputLostError, OutputWriteError
    from mmdeploy_llm.report.page import report_batch
    from mmdeploy_llm.report.previews import FilePreviews
    from mmdeploy_llm.report.target import check_page

    from .terminal import batch_summary, caption_table, make_console, printable

    if page is not None:
        check_page(Path(page))
    try:
        summary = run_batch(job, lambda: open_answerer(model, options, cluster))
    except (OutputLostError, OutputWriteError):  # says where the finished items are
        raise
    except Exception:
        if job.sink.exists():
            typer.echo("finished items are saved; --resume continues this run", err=True)
        raise
    fault = None
    if page is not None and summary.num_records:
        about: Any = {"model": model, "about": options, "is_caption": is_caption}
        previews = FilePreviews(
            lambda: open_reader(model, options), lambda: open_media(model, options)
        )
        try:
            report_batch(summary, page, job.settings, previews=previews, **about)
        except (MMDeployLLMError, OSError) as error:  # the summary comes first
            page, fault = None, error
    if is_table_shown:
        records = list(summary.records())
        make_console().print(caption_table(records))
        typer.echo()
    typer.echo(batch_summary(summary, done="captioned" if is_caption else "done"))
    what = "captions:" if is_caption else "results: "
    typer.echo(printable(f"{what} {job.sink.name}" + (f"\nreport:   {page}" if page else "")))
    if fault is not None:
        raise fault
    end_with_exit_code(summary)


def end_with_exit_code(summary: BatchSummary) -> None:
    """Prints how to continue and exits with an error code, unless every item succeeded."""
    left = "some" if summary.num_left is None else str(summary.num_left)
    if summary.ending == "interrupted":
        typer.echo(f"stopped with {left} left; the same command with --resume does them", err=True)
        raise typer.Exit(INTERRUPTED)
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
    if summary.num_lacking:
        raise typer.Exit(SOME_LACKING)
