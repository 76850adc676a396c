"""Options of how vectors are made, and all options of `embed`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

import typer

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.values.pooling_request import TooLong as Choice

from .effort import EffortOptions
from .estimate import EstimateOptions
from .files import CountedPages
from .groups import Group
from .job import JobOptions
from .model import ModelOptions
from .output import ShownOptions
from .resume import ResumeOptions
from .selection import SelectionOptions
from .shared import FileRows, OutputRows, ProgressRows
from .values import engine_options, text_value

Instruction = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="What the vectors are for: a text, @FILE, or the name of a prompt that the model's "
        "folder has, such as query.  [default: the model's own]",
    ),
]


def _known_choice(given: str) -> str:
    if given not in get_args(Choice):
        names = ", ".join(get_args(Choice))
        raise ConfigError(f"--too-long must be one of {names}, got {given!r:.40}")
    return given


TooLong = Annotated[
    str,
    typer.Option(
        metavar="error|cut|chunk",
        callback=_known_choice,
        help="A text of more tokens than the model reads is an error, is cut to them, or is read "
        "in windows (chunk), whose vectors' mean counts.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorOptions(Group):
    """The text that is embedded of each item, and how."""

    title: ClassVar[str] = "Vectors"

    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="The text of each item, embedded with its media, or @FILE. Of a corpus it may "
            "have columns: '{title}. {body}'.  [default: the media alone]",
        ),
    ] = None
    instruction: Instruction = None
    dimensions: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Cut vectors to their first N numbers, for models that were trained so.",
        ),
    ] = None
    too_long: TooLong = "error"
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            hidden=True,
            help="Whether vectors have length 1, also with --dimensions.  [default: as the "
            "model's folder says, before they are cut, as sentence-transformers does it]",
        ),
    ] = None
    pooling: Annotated[
        str | None,
        typer.Option(
            metavar="last|cls|mean|tokens",
            hidden=True,
            help="Of which tokens a vector is made: the last, the first (cls), the mean of all, or "
            "one of each (tokens).  [default: as the model's folder says, else last]",
        ),
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns the text of each item, and what is asked: a vector. Raises ConfigError."""
        from mmdeploy_llm.client.vector_asks import vector_asks

        asks = vector_asks(
            dimensions=self.dimensions,
            normalize=self.normalize,
            instruction=text_value("--instruction", self.instruction),
            pooling=self.pooling,
            too_long=self.too_long,
        )
        return {"question": text_value("--prompt", self.prompt), "asks": asks}


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions(Group):
    """The groups of `embed`, in the order of --help."""

    purpose: ClassVar[str] = "vectors"

    model: ModelOptions
    vectors: VectorOptions
    selection: SelectionOptions
    files: FileRows
    pages: CountedPages
    output: OutputRows
    shown: ShownOptions
    progress: ProgressRows
    resume: ResumeOptions
    effort: EffortOptions
    estimate: EstimateOptions
    job: JobOptions

    def llm_options(self, ctx: typer.Context, **more: Any) -> dict[str, Any]:
        """Returns the options of LLM(), see engine_options."""
        return engine_options(ctx, self.model.engine, **self.to_engine(), **more)


Column = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        rich_help_panel="Input",
        help="Column with the vectors, of a table that `embed` has not written.  [default: the "
        "only one with lists of numbers]",
    ),
]
