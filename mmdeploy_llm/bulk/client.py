"""BulkClient: LLM's methods for whole batches, whose items are read and written one by one."""

from __future__ import annotations

import os
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

from mmdeploy_llm.batch.engine import describe_engine
from mmdeploy_llm.batch.job import BatchJob, BatchSettings, mode_of, plan_batch, run_batch
from mmdeploy_llm.batch.options import BatchOptions, option_settings
from mmdeploy_llm.batch.summary import BatchSummary
from mmdeploy_llm.client.arguments import one_params
from mmdeploy_llm.client.client import EngineClient
from mmdeploy_llm.config import EngineConfig
from mmdeploy_llm.desk.feed import Feed
from mmdeploy_llm.desk.outcome import Answer
from mmdeploy_llm.desk.ticket import Ask
from mmdeploy_llm.finding.options import with_reader
from mmdeploy_llm.params import SamplingParams
from mmdeploy_llm.records.outcome import Retried
from mmdeploy_llm.report.page import report_batch
from mmdeploy_llm.report.previews import FilePreviews
from mmdeploy_llm.report.target import check_page
from mmdeploy_llm.startup.media import open_media, open_reader


class BulkClient(EngineClient):
    """Base of LLM."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        super().__init__(config)

    def answer_each(self, asks: Iterable[Ask]) -> Generator[Answer, None, None]:
        """Yields results as generate_iter does, each with its ask. Closing the generator aborts the
        requests that are still running."""
        return self._answers(Feed(self._desk, asks))

    def run_batch(
        self,
        input: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
        output: str | os.PathLike[str],
        *,
        resume: bool | Literal["anyway"] = False,
        overwrite: bool = False,
        retry_failed: bool | Collection[int | str] | str = True,
        prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        report: str | os.PathLike[str] | None = None,
        use_tqdm: bool = True,
        **options: Unpack[BatchOptions],
    ) -> BatchSummary:
        """Answers a whole batch and adds each result to `output` as it finishes: a line of a JSONL
        file, or by its suffix or URL an item of a part.

        input: a folder of images and videos (`prompt` is asked about each), a corpus in one of the
        formats of docs/corpus.md, or an iterable of dicts with the keys of a JSONL line, read
        lazily; media paths in a file are relative to its folder.
        options: image_column, video_column, prompt_column, id_column of a corpus, and columns,
        which records repeat; `prompt` may name columns too: "Describe {title}."; and those of the
        output, see OutputOptions.
        sampling_params, chat_template_kwargs: used where a line has none of its own.
        resume: keep the output; answer items that are missing, have changed or, with retry_failed,
        failed: True for all of these, or error codes and outcomes, such as [408, "empty"].
        "anyway": also if other results are of another model or of other parameters.
        overwrite: replace the output, which otherwise must not exist. report: an HTML page.
        Raises ConfigError for a wrong call, and when the output is lost, OutputLostError or
        OutputWriteError, which say how to continue; an item with an error becomes a line with it.
        Ctrl-C raises KeyboardInterrupt once the output is closed; resume=True then continues.
        """
        settings = BatchSettings(
            mode=mode_of(resume, overwrite),
            sampling_params=one_params(sampling_params),
            chat_template_kwargs=dict(chat_template_kwargs or {}),
            question=prompt,
            retried=Retried.parse(retry_failed),
            **option_settings(options),
            max_media_bytes=self._config.max_media_bytes,
            allowed_media_root=self._config.allowed_media_root,
            is_any_config_kept=resume == "anyway",
            describe_engine=partial(describe_engine, self._config),
            is_progress_shown=None if use_tqdm else False,
        )
        settings = with_reader(settings, lambda: open_reader(self._config))
        return self._batch(plan_batch(input, output, settings), report)

    def _batch(self, job: BatchJob, report: str | os.PathLike[str] | None) -> BatchSummary:
        """Runs a batch and writes its report, if one is wanted."""
        if report is not None:
            check_page(Path(report))
        summary = run_batch(job, self._lent)
        if summary.ending == "interrupted":
            raise KeyboardInterrupt
        if report is not None:
            self._report(summary, report, job.settings)
        return summary

    def _report(
        self, summary: BatchSummary, path: str | os.PathLike[str], settings: BatchSettings
    ) -> None:
        """Writes the HTML page of a batch, with the frames of its videos."""
        config, media = self._config, self._desk.media
        previews = FilePreviews(
            lambda: open_reader(config) if media is None else media,
            lambda: open_media(config) if media is None else media,
        )
        report_batch(summary, path, settings, model=config.model, previews=previews)

    def _answers(self, feed: Feed) -> Generator[Answer, None, None]:
        """Yields the answers of a feed; holds this object, whose engine would end with it."""
        with closing(feed.answers()) as answers:
            yield from answers
