"""Options of how documents are read, and all options of `read`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.batch.documents.reading.options import check_tables
from mmdeploy_llm.errors import ConfigError

from .answer import Thinking
from .effort import EffortOptions
from .estimate import EstimateOptions
from .files import PAGES, Dpi, FileOptions, Password
from .groups import Group, Groups
from .job import JobOptions
from .model import ModelOptions
from .output import OutputOptions, ShownOptions
from .progress import TellingChoices
from .resume import ResumeOptions
from .selection import SelectionOptions
from .values import engine_options, named_values, template_kwargs, text_value


@dataclass(frozen=True, slots=True, kw_only=True)
class PageOptions(Group):
    """Which pages are read, and how they are drawn."""

    title: ClassVar[str] = "Input"

    pages: Annotated[str | None, typer.Option(metavar="RANGES", help=PAGES)] = None
    dpi: Dpi = None
    password: Password = None

    def to_options(self) -> dict[str, Any]:
        """Returns options of documents, without those that are not given."""
        password = text_value("--password", self.password)
        found = {"dpi": self.dpi, "password": password}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class AskingOptions(Group):
    """How the model is asked for the text of a page."""

    title: ClassVar[str] = "Question and answer"

    preset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How the model is asked: a preset that `mmdeploy-llm plugins` lists.  "
            "[default: the one for the model]",
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What is asked for: page, or another task of the preset, such as table.",
        ),
    ] = None
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="The question about each page instead of the preset's, or @FILE. It may have "
            "{text_layer}, what the document itself says, {page}, {pages}, {width} and {height}.",
        ),
    ] = None
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

    def question(self) -> str | None:
        """Returns the question, if one is given."""
        return text_value("--prompt", self.prompt)

    def values(self) -> dict[str, Any]:
        """Returns parameters of SamplingParams. Raises ConfigError for one given twice."""
        more = named_values("--sampling", self.sampling or [], "top_p=0.9")
        if "max_tokens" in more and self.max_tokens is not None:
            raise ConfigError("--max-tokens and --sampling max_tokens=... : give one of them")
        limit = {} if self.max_tokens is None else {"max_tokens": self.max_tokens}
        return {**limit, **more}


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
    tables: Annotated[
        str | None,
        typer.Option(
            metavar="html|markdown",
            help="Write all tables alike.  [default: as the model writes them]",
        ),
    ] = None
    running: Annotated[
        str,
        typer.Option(
            metavar="mark|keep",
            hidden=True,
            help="Headers and footers that many pages of a document have: made comments after the "
            "first one, or kept. Pages alone and records keep them.",
        ),
    ] = "mark"

    def check(self) -> None:
        """Raises ConfigError for unknown choices, and for one without an effect."""
        check_tables(self.tables, self.running, is_written=self.markdown is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(Groups):
    """The groups of `read`, in the order of --help."""

    model: ModelOptions
    asking: AskingOptions
    pages: PageOptions
    selection: SelectionOptions
    files: FileOptions
    output: OutputOptions
    written: MarkdownOptions
    shown: ShownOptions
    telling: TellingChoices
    resume: ResumeOptions
    effort: EffortOptions
    estimate: EstimateOptions
    job: JobOptions

    def llm_options(self, ctx: typer.Context, **more: Any) -> dict[str, Any]:
        """Returns the options of LLM(), see engine_options."""
        return engine_options(ctx, self.model.engine, **{**self.to_engine(), **more})
