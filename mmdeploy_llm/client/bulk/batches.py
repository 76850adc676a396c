"""Runs whole batches on a loaded model: their items are read and written one by one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from mmdeploy_llm.batch.documents.sources import Sources
from mmdeploy_llm.batch.engine import describe_engine
from mmdeploy_llm.batch.job import plan_batch, run_batch, source_of
from mmdeploy_llm.batch.options import mode_of
from mmdeploy_llm.batch.settings import BatchJob, BatchSettings
from mmdeploy_llm.batch.summary import BatchSummary
from mmdeploy_llm.data.records.outcome import Retried
from mmdeploy_llm.engine.desk.answerer import LoadedModel
from mmdeploy_llm.engine.startup.kinds import accepted_kinds, known_kinds, usual_question
from mmdeploy_llm.engine.startup.media import check_boxes, open_media
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.media.loading.reader import open_reader
from mmdeploy_llm.values.options.config import EngineConfig
from mmdeploy_llm.values.text.progress_bars import UseTqdm, where_seen

if TYPE_CHECKING:
    from mmdeploy_llm.batch.estimate.result import Estimate

logger = logging.getLogger(__name__)

Input = str | os.PathLike[str] | Iterable[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchModel:
    """A loaded model, as batches need it. media: what reads media for it; None where its engines
    are other processes. lend: returns a context with the model that does not close it."""

    config: EngineConfig
    media: Any
    lend: Callable[[], AbstractContextManager[LoadedModel]]


def written_settings(
    config: EngineConfig,
    resume: bool | Literal["anyway"],
    overwrite: bool,
    retry_failed: bool | Collection[int | str] | str,
    chat_template_kwargs: Mapping[str, Any] | None,
    use_tqdm: UseTqdm,
    **fields: Any,
) -> BatchSettings:
    """Returns the settings of a batch that is written. fields: those that not all of them
    have."""
    return BatchSettings(
        mode=mode_of(resume, overwrite),
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        retried=Retried.parse(retry_failed),
        max_media_bytes=config.max_media_bytes,
        allowed_media_root=config.allowed_media_root,
        is_any_config_kept=resume == "anyway",
        describe_engine=partial(describe_engine, config),
        use_tqdm=where_seen(use_tqdm),
        **fields,
    )


def informed(
    settings: BatchSettings, config: EngineConfig, sources: Sources | None = None
) -> BatchSettings:
    """Returns the settings with what an engine decides about media. sources: of files."""
    return settings.for_model(
        lambda: open_reader(config),
        known_kinds(config),
        lambda: accepted_kinds(config),
        None if sources is None else sources.open,
        usual_question(config),
    )


def run_input(
    model: BatchModel,
    input: Input,
    output: str | os.PathLike[str],
    settings: BatchSettings,
    report: str | os.PathLike[str] | None,
    live: bool | int,
    after: Callable[[BatchSummary], object] = bool,
) -> BatchSummary:
    """Answers each item of an input, see LLM.run_batch. after: as for run_job."""
    with Sources(model.config, settings.finding.pages) as sources:
        job = plan_batch(input, output, informed(settings, model.config, sources))
        return run_job(model, job, report, live, after)


def estimate_input(
    llm: LoadedModel,
    config: EngineConfig,
    input: Input,
    fields: Mapping[str, Any],
    *,
    num_items: int,
    seed: int,
) -> Estimate:
    """Returns what all items of an input will take, see LLM.estimate_batch. fields: of
    BatchSettings."""
    from mmdeploy_llm.batch.estimate.estimate import estimate

    settings = BatchSettings(
        **fields,
        max_media_bytes=config.max_media_bytes,
        allowed_media_root=config.allowed_media_root,
    )
    with Sources(config, settings.finding.pages) as sources:
        source = source_of(input, informed(settings, config, sources))
        return estimate(source, settings.selection, llm, num_items=num_items, seed=seed)


def run_job(
    model: BatchModel,
    job: BatchJob,
    report: str | os.PathLike[str] | None,
    live: bool | int,
    after: Callable[[BatchSummary], object] = bool,
) -> BatchSummary:
    """Runs a batch and writes its report, if one is wanted, with the frames of its videos.
    after: called with the summary, also of a run that Ctrl-C has ended."""
    from mmdeploy_llm.batch.report.previews import FilePreviews
    from mmdeploy_llm.batch.report.whole import ReportOptions, RunReport

    if job.settings.boxes:
        check_boxes(model.config, job.settings.sampling_params)
    if report is None:
        if live:
            raise ConfigError("live serves the report: name its file with report")
        return _ended(run_batch(job, model.lend), after)
    config, media = model.config, model.media
    previews = FilePreviews(
        lambda: open_reader(config) if media is None else media,
        lambda: open_media(config) if media is None else media,
    )
    port = None if live is False else 0 if live is True else live
    options = ReportOptions(model=config.model, about={}, live_port=port)
    whole = RunReport(job, Path(report), previews, options)
    if whole.url is not None:
        logger.info("the report, while the run goes on: %s", whole.url)
    summary = whole.run(model.lend)
    whole.write(summary)
    return _ended(summary, after)


def _ended(summary: BatchSummary, after: Callable[[BatchSummary], object]) -> BatchSummary:
    """Returns the summary. Raises KeyboardInterrupt for a run that Ctrl-C has ended."""
    after(summary)
    if summary.ending == "interrupted":
        raise KeyboardInterrupt
    return summary
