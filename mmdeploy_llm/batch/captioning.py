"""A captioning job from its wishes to its files: what is left to do, the run, the report."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .inputs import find_images
from .records import CaptionRecord
from .report import MakeThumbnail, ReportHead, write_report
from .run import Captioner, CaptionTask, RunSummary, caption_images
from .writer import Mode, RecordWriter, check_target, paths_done, read_records

OpenCaptioner = Callable[[], AbstractContextManager[Captioner]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptionJob:
    """What is to be done. todo: the images that have no caption in `output` yet."""

    images: tuple[str, ...]
    todo: tuple[str, ...]
    output: Path
    mode: Mode
    task: CaptionTask


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """What was done in this run, and what is known of each image of the job, in its order."""

    summary: RunSummary
    records: tuple[CaptionRecord, ...]

    @property
    def num_failed(self) -> int:
        """Images without a caption because of an error."""
        return sum(not record.is_ok for record in self.records)


def plan_job(
    paths: list[str], output: Path, mode: Mode, task: CaptionTask, *, is_recursive: bool
) -> CaptionJob:
    """The job, checked; changes no file. Raises ConfigError for inputs that are not there and an
    output that cannot be written."""
    images = find_images(paths, is_recursive=is_recursive)
    check_target(output, mode)
    done = paths_done(output) if mode == "resume" else frozenset()
    todo = tuple(path for path in images if path not in done)
    return CaptionJob(images=images, todo=todo, output=output, mode=mode, task=task)


def run_job(job: CaptionJob, open_llm: OpenCaptioner) -> JobResult:
    """Runs the job; the model is opened only when there is something to do, and before the output
    is touched."""
    summary = RunSummary(num_images=0, num_failed=0, num_output_tokens=0, elapsed=0.0)
    if job.todo:
        with open_llm() as llm, RecordWriter(job.output, job.mode, set(job.todo)) as writer:
            summary = caption_images(llm, job.todo, job.task, writer.write)
    known = {record.path: record for record in read_records(job.output)}
    records = tuple(known[path] for path in job.images if path in known)
    return JobResult(summary=summary, records=records)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportSettings:
    """What the report says of a run beside its results."""

    model: str
    version: str
    settings: Mapping[str, str] = field(default_factory=dict)


def report_job(
    job: CaptionJob,
    result: JobResult,
    path: Path,
    about: ReportSettings,
    make_thumbnail: MakeThumbnail,
) -> None:
    """Writes the HTML page of all the job's images, those of earlier runs included."""
    summary = result.summary
    speeds = {
        "images/s": f"{summary.images_per_second:.1f}",
        "tokens/s": f"{summary.tokens_per_second:.0f}",
    }
    head = ReportHead(
        model=about.model,
        prompt=job.task.prompt,
        created=f"{datetime.datetime.now():%d %B %Y, %H:%M}",
        version=about.version,
        speeds=speeds if summary.num_images else {},
        settings=about.settings,
    )
    write_report(path, result.records, head, make_thumbnail)


def settings_of(job: CaptionJob, options: Mapping[str, Any]) -> dict[str, str]:
    """What was asked of the engine, of sampling and of the chat template, in words."""
    asked = {
        **options,
        **job.task.sampling_params.model_dump(exclude_unset=True),
        **job.task.chat_template_kwargs,
    }
    return {name: str(value) for name, value in asked.items()}
