"""Options of the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.errors import ConfigError

from .groups import Group
from .values import read_text, text_value

System = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="System message that opens the conversation, or @FILE. A line of a batch may have "
        "its own.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions(Group):
    """The question about every file, or every row of a corpus."""

    title: ClassVar[str] = "Question and answer"

    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="The question about each item, or @FILE. - is standard input, @@ a literal @. "
            "About rows of a corpus it may have columns: 'Describe {title}.'  "
            "[default: Describe the image. / Describe the video.]",
        ),
    ] = None
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", hidden=True, help="File with the question: --prompt @FILE."),
    ] = None
    system: System = None

    def to_settings(self) -> dict[str, Any]:
        """Returns the question and the system message. Raises ConfigError."""
        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError("--prompt and --prompt-file contradict each other; give one of them")
        question = text_value("--prompt", self.prompt)
        if self.prompt_file is not None:
            question = read_text("--prompt-file", self.prompt_file)
        return {"question": question, "system": text_value("--system", self.system)}
