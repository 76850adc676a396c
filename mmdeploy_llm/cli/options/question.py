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
        help="The system message, or @FILE. It opens the conversation; a line of a batch may have "
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
            "[default: what the model's family reads, or else Describe the image.]",
        ),
    ] = None
    prompt_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", hidden=True, help="File with the question: --prompt @FILE."),
    ] = None
    ask: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TEXT",
            help="One of several questions about each item. May be repeated; the record has the "
            "answers by these names. TEXT is as that of --prompt.",
        ),
    ] = None
    system: System = None

    def to_settings(self) -> dict[str, Any]:
        """Returns the questions and the system message. Raises ConfigError."""
        from mmdeploy_llm.batch.questions.asks import Asks

        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError("--prompt and --prompt-file contradict each other; give one of them")
        question = text_value("--prompt", self.prompt)
        if self.prompt_file is not None:
            question = read_text("--prompt-file", self.prompt_file)
        texts = dict(_named(text) for text in self.ask or [])
        if len(texts) < len(self.ask or []):
            raise ConfigError("--ask gives a name twice; names must differ")
        return {
            "question": question,
            "asks": Asks.given(texts or None),
            "system": text_value("--system", self.system),
        }


def _named(text: str) -> tuple[str, str]:
    """Returns name and question of NAME=TEXT."""
    name, separator, question = text.partition("=")
    if not separator:
        raise ConfigError(f'--ask {text[:40]!r} must be NAME=TEXT, such as tags="List tags."')
    return name, str(text_value(f"--ask {name}", question))
