"""All options that `caption` and `batch` have alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import typer

from .answer import AnswerOptions
from .boxes import BoxOptions
from .checks import CheckOptions
from .effort import EffortOptions
from .estimate import EstimateOptions
from .files import PagedFileOptions
from .groups import Groups
from .job import JobOptions
from .model import ModelOptions
from .output import OutputOptions, ShownOptions
from .progress import TellingChoices
from .question import QuestionOptions
from .resume import ResumeOptions
from .selection import SelectionOptions
from .sidecars import SidecarChoices
from .values import engine_options


class RunDesk(Protocol):
    """The part of a command's options that running a job needs."""

    @property
    def model(self) -> ModelOptions: ...
    @property
    def shown(self) -> ShownOptions: ...
    @property
    def effort(self) -> EffortOptions: ...
    @property
    def job(self) -> JobOptions: ...

    def to_settings(self) -> dict[str, Any]:
        """Returns fields of BatchSettings."""

    def to_sampling(self) -> dict[str, Any]:
        """Returns parameters of SamplingParams."""


class EstimateDesk(RunDesk, Protocol):
    """The part of a command's options that an estimate needs."""

    @property
    def estimate(self) -> EstimateOptions: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskOptions(Groups):
    """The groups of `caption` and `batch`, in the order of --help."""

    model: ModelOptions
    question: QuestionOptions
    answer: AnswerOptions
    checks: CheckOptions
    boxes: BoxOptions
    selection: SelectionOptions
    files: PagedFileOptions
    output: OutputOptions
    shown: ShownOptions
    sidecars: SidecarChoices
    telling: TellingChoices
    resume: ResumeOptions
    effort: EffortOptions
    estimate: EstimateOptions
    job: JobOptions

    def llm_options(self, ctx: typer.Context, **more: Any) -> dict[str, Any]:
        """Returns the options of LLM(), see engine_options."""
        return engine_options(ctx, self.model.engine, **self.to_engine(), **more)
