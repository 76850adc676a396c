"""A batch from its wishes to its files: what is left to do, the run, the summary."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.messages import Prompt
from mmdeploy_llm.params import SamplingParams

from .ids import Selection
from .items import BadItem, Item
from .output import Kept, Mode, RecordWriter, check_target, scan
from .run import Answerer, BatchRun, Ending, RunCounts, Tally, left_to_do
from .sources import Source, open_source

if TYPE_CHECKING:
    from mmdeploy_llm.drive import JobOutput

    from .output import RecordIndex

OpenLLM = Callable[[], AbstractContextManager[Answerer]]
MAX_BAD_AHEAD = 1000  # lines that cannot be used, looked at before a model is opened


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """How a batch is done.

    sampling_params, chat_template_kwargs: for what a line does not say itself. question: what is
    asked about each file of a folder. selection: the part of the input to do. max_failures: end
    when so many items of this run failed. is_failed_redone: with mode "resume", whether failed
    items are done again. is_progress_shown: None shows a bar on a terminal only.
    """

    mode: Mode = "new"
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    question: str | None = None
    selection: Selection = field(default_factory=Selection)
    max_failures: int | None = None
    is_failed_redone: bool = True
    is_progress_shown: bool | None = None

    def __post_init__(self) -> None:
        if self.max_failures is not None and self.max_failures < 1:
            raise ConfigError(f"max_failures must be at least 1, got {self.max_failures}")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSummary:
    """What became of a batch.

    run: what this run did. num_before: items that earlier runs had done. num_failed: items of the
    batch that stand with an error, of earlier runs too; failures: these by code and class.
    num_left: items without a record; None when their number is not known. ending: "done",
    "max_failures" or "interrupted". index: where the records stand in `output`.
    """

    output: Path
    ending: Ending
    run: RunCounts
    num_before: int
    failures: Mapping[str, int]
    num_left: int | None
    index: RecordIndex

    @property
    def num_failed(self) -> int:
        """Items of the batch that stand with an error."""
        return sum(self.failures.values())

    @property
    def num_records(self) -> int:
        """Items of the batch with a record in the output."""
        return len(self.index)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """A batch that was checked and not begun. items: what is left to do, to be gone through once.
    needs_model: False when nothing is left but lines that cannot be used."""

    source: Source
    output: Path
    settings: BatchSettings
    kept: Kept
    items: Iterator[Item | BadItem]
    needs_model: bool
    is_empty: bool


def plan_batch(
    given: str | os.PathLike[str] | Iterable[Mapping[str, Any]],
    output: str | os.PathLike[str],
    settings: BatchSettings,
) -> BatchJob:
    """The job for a JSONL file, a Parquet file, a folder or an iterable of dicts; changes no file.

    Raises ConfigError for an input that is not there and an output that cannot be written.
    """
    if isinstance(given, Mapping):
        raise ConfigError("a batch is an iterable of dicts or a path, got one dict; put it in []")
    path = Path(output)
    if isinstance(given, (str, os.PathLike)) and Path(given).resolve() == path.resolve():
        raise ConfigError(f"{str(path)!r} is the input; write the output elsewhere")
    check_target(path, settings.mode)
    source = open_source(
        given,
        settings.sampling_params,
        settings.selection,
        question=settings.question,
        template_kwargs=settings.chat_template_kwargs,
    )
    return plan_source(source, path, settings)


def plan_source(source: Source, output: Path, settings: BatchSettings) -> BatchJob:
    """The job for a source. Raises ConfigError as `plan_batch` does."""
    check_target(output, settings.mode)
    kept = Kept()
    if settings.mode == "resume":
        kept = scan(output, source.place_of, is_failed_redone=settings.is_failed_redone)
    todo = left_to_do(source, kept.done)
    ahead = list(_until_item(todo))
    return BatchJob(
        source=source,
        output=output,
        settings=settings,
        kept=kept,
        items=itertools.chain(ahead, todo),
        needs_model=len(ahead) > MAX_BAD_AHEAD or isinstance(next(iter(ahead[-1:]), None), Item),
        is_empty=not ahead,
    )


def _until_item(todo: Iterator[Item | BadItem]) -> Iterator[Item | BadItem]:
    """The beginning of `todo` up to its first item, or a bounded number of bad lines."""
    for number, item in enumerate(todo):
        yield item
        if isinstance(item, Item) or number == MAX_BAD_AHEAD:
            return


def run_batch(job: BatchJob, open_llm: OpenLLM) -> BatchSummary:
    """Runs the job. The model is opened only when an item needs it, and before the output is
    touched; with nothing left to do the output stays as it is."""
    num_before, index = len(job.kept.index), job.kept.index
    is_through = job.is_empty and job.settings.mode == "resume" and job.output.exists()
    if is_through and not job.kept.drops:
        return _summary(job, "done", RunCounts(), num_before)
    with open_llm() if job.needs_model else _NoModel() as llm:
        mode = job.settings.mode
        with RecordWriter(job.output, mode, job.kept) as writer:
            tally = Tally(
                unit=job.source.unit,
                total=job.source.total,
                num_before=len(index),
                is_shown=job.settings.is_progress_shown,
            )
            try:
                run = BatchRun(
                    job.items, writer, tally=tally, max_failures=job.settings.max_failures
                )
                ending = run.run(llm)
            finally:
                tally.close()
    return _summary(job, ending, tally.counts(), num_before)


def _summary(job: BatchJob, ending: Ending, run: RunCounts, num_before: int) -> BatchSummary:
    index, total = job.kept.index, job.source.total
    num_left = 0 if ending == "done" else None if total is None else max(0, total - len(index))
    return BatchSummary(
        output=job.output,
        ending=ending,
        run=run,
        num_before=num_before,
        failures=dict(index.failures.most_common()),
        num_left=num_left,
        index=index,
    )


class _NoModel:
    """Answers nothing: for lines that cannot be used, which need no model."""

    def answer_each(
        self, pairs: Iterable[tuple[Prompt, SamplingParams]]
    ) -> Generator[JobOutput, None, None]:
        """Goes through the pairs, of which there are none."""
        for prompt, _ in pairs:
            raise AssertionError(f"an item reached a run without a model: {prompt!r}")
        yield from ()

    def __enter__(self) -> _NoModel:
        return self

    def __exit__(self, *_: object) -> None:
        return None
