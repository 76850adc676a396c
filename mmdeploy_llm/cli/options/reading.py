"""Options of how documents are read, and all options of `read`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.batch.documents.reading.options import WishArguments
from mmdeploy_llm.errors import ConfigError

from .answer import Thinking
from .effort import EffortOptions
from .estimate import EstimateOptions
from .files import with_text
from .groups import Given, Group, Rows
from .job import JobOptions
from .model import ModelOptions
from .output import ShownOptions
from .resume import ResumeOptions
from .selection import SelectionOptions
from .shared import FileRows, OutputRows, ProgressRows
from .values import engine_options, named_values, template_kwargs


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingOptions(Group):
    """How the model is asked for the text of a page."""

    title: ClassVar[str] = "Question and answer"

    asked: Annotated[Given, Rows(WishArguments, "preset", "task", "prompt")]
    thinking: Thinking = None
    max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Upper limit of generated tokens per page.  [default: of the preset]",
        ),
    ] = None
    sampling: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            hidden=True,
            help="Another sampling parameter, such as top_p=0.9, or a JSON file; may be repeated. "
            "Without them every answer is the most probable one.",
        ),
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns the variables for the chat template."""
        return {"chat_template_kwargs": template_kwargs(self.thinking)}

    def to_engine(self) -> dict[str, Any]:
        """Returns the parser that takes the reasoning out of answers: the model's own."""
        return {"reasoning_parser": "auto"}

    def to_batch(self) -> dict[str, Any]:
        """Returns how the model is asked. Raises ConfigError for a parameter given twice."""
        more = named_values("--sampling", self.sampling or [], "top_p=0.9")
        if "max_tokens" in more and self.max_tokens is not None:
            raise ConfigError("--max-tokens and --sampling max_tokens=... : give one of them")
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {**with_text(self.asked, "prompt"), "sampling": {**limit, **more}}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions(Group):
    """Which pages are read, and how they are drawn."""

    title: ClassVar[str] = "Input"

    chosen: Annotated[Given, Rows(WishArguments, "pages", "dpi", "upright", "password")]

    def to_batch(self) -> dict[str, Any]:
        """Returns the pages, with a password that a file has."""
        return with_text(self.chosen, "password")


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkdownOptions(Group):
    """The Markdown that is written."""

    title: ClassVar[str] = "Output"

    markdown: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write Markdown too: NAME.md for each document, NAME.pages/0001.md for each page.",
        ),
    ] = None
    written: Annotated[Given, Rows(WishArguments, "tables", "running")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(Group):
    """The groups of `read`, in the order of --help."""

    purpose: ClassVar[str] = "pages"

    model: ModelOptions
    asking: AskingOptions
    pages: PageOptions
    selection: SelectionOptions
    files: FileRows
    output: OutputRows
    written: MarkdownOptions
    shown: ShownOptions
    progress: ProgressRows
    resume: ResumeOptions
    effort: EffortOptions
    estimate: EstimateOptions
    job: JobOptions

    def llm_options(self, ctx: typer.Context, **more: Any) -> dict[str, Any]:
        """Returns the options of LLM(), see engine_options."""
        return engine_options(ctx, self.model.engine, **{**self.to_engine(), **more})
