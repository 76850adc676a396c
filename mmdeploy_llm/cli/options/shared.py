"""All options that `caption` and `batch` have alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Protocol

import typer

from mmdeploy_llm.batch.arguments import AskingArguments, RunArguments
from mmdeploy_llm.data.files.arguments import FindingArguments
from mmdeploy_llm.data.outputs.sidecars.arguments import SidecarArguments

from .answer import AnswerOptions
from .effort import EffortOptions
from .estimate import EstimateOptions
from .files import CountedPages
from .groups import Given, Group, Rows
from .job import JobOptions
from .model import ModelOptions
from .output import ShownOptions
from .question import CheckOptions, QuestionOptions
from .resume import ResumeOptions
from .selection import SelectionOptions
from .values import engine_options

# Which files of folders and globs are read, and what is told of the others.
FileRows = Annotated[Given, Rows(FindingArguments, title="Input")]
OutputRows = Annotated[Given, Rows(RunArguments, "format", "part_items", "journal", title="Output")]
ProgressRows = Annotated[Given, Rows(RunArguments, "log_json", title="Run")]


class RunDesk(Protocol):
    """The part of a command's options that running a job needs.

    purpose: what a model is wanted for, see cli/options/suggested.py."""

    purpose: ClassVar[str]

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

    def to_batch(self) -> dict[str, Any]:
        """Returns options of LLM.run_batch."""

    def to_sampling(self) -> dict[str, Any]:
        """Returns parameters of SamplingParams."""


class EstimateDesk(RunDesk, Protocol):
    """The part of a command's options that an estimate needs."""

    @property
    def selection(self) -> SelectionOptions: ...
    @property
    def resume(self) -> ResumeOptions: ...
    @property
    def estimate(self) -> EstimateOptions: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DeskOptions(Group):
    """The groups of `caption` and `batch`, in the order of --help."""

    purpose: ClassVar[str] = "photos"

    model: ModelOptions
    question: QuestionOptions
    answer: AnswerOptions
    checks: CheckOptions
    boxes: Annotated[Given, Rows(AskingArguments, "boxes", title="Question and answer")]
    selection: SelectionOptions
    files: FileRows
    pages: CountedPages
    output: OutputRows
    shown: ShownOptions
    sidecars: Annotated[Given, Rows(SidecarArguments, title="Output")]
    progress: ProgressRows
    resume: ResumeOptions
    effort: EffortOptions
    estimate: EstimateOptions
    job: JobOptions

    def llm_options(self, ctx: typer.Context, **more: Any) -> dict[str, Any]:
        """Returns the options of LLM(), see engine_options."""
        return engine_options(ctx, self.model.engine, **self.to_engine(), **more)
