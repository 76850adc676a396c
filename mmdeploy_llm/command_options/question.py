"""Options of the question."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.errors import ConfigError

from .groups import Group


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
            help="The question about each item. About rows of a corpus it may have columns: "
            "'Describe {title}.' @FILE is read, and @@ begins a text with @.  "
            "[default: Describe the image. / Describe the video.]",
        ),
    ] = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            hidden=True, metavar="FILE", help="File with the question, as --prompt @FILE."
        ),
    ] = None
    ask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="One of several questions about each item. May be repeated; the record has the "
            "answers by these names. TEXT may have columns or be @FILE, as that of --prompt.",
        ),
    ] = None
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            hidden=True,
            help="The system message. TEXT may be @FILE. A line's own system message wins.",
        ),
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns the questions. Raises ConfigError for files that cannot be read."""
        from mmdeploy_llm.questions.asks import Asks, text_or_file

        prompt = self.prompt
        if self.prompt_file is not None:
            if prompt is not None:
                raise ConfigError("--prompt and --prompt-file: give one of them")
            prompt = f"@{self.prompt_file}"
        question = None if prompt is None else text_or_file(prompt, "--prompt")
        return {"question": question, "asks": Asks.given(self.ask or None, self.system)}
