"""Options of the question, and of what an answer must keep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.batch.arguments import AskingArguments
from mmdeploy_llm.errors import ConfigError

from .files import with_text
from .groups import Given, Group, Rows
from .values import read_text, text_value

CHECKS = ("schema", "validate", "avoid", "max_words", "max_chars")


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
    asked: Annotated[Given, Rows(AskingArguments, "ask", "system")]

    def to_settings(self) -> dict[str, Any]:
        """Returns the question. Raises ConfigError."""
        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError("--prompt and --prompt-file contradict each other; give one of them")
        question = text_value("--prompt", self.prompt)
        if self.prompt_file is not None:
            question = read_text("--prompt-file", self.prompt_file)
        return {"question": question}

    def to_batch(self) -> dict[str, Any]:
        """Returns several questions, and the system message. Raises ConfigError."""
        given = with_text(self.asked, "system")
        return {**given, "ask": named_questions(given["ask"])} if "ask" in given else given


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions(Group):
    """Rules that every answer must keep."""

    title: ClassVar[str] = "Question and answer"

    kept: Annotated[Given, Rows(AskingArguments, *CHECKS, "validate_retries")]

    def to_batch(self) -> dict[str, Any]:
        """Returns the rules. Raises ConfigError for retries without any."""
        if "validate_retries" in self.kept and len(self.kept) == 1:
            raise ConfigError(
                "--validate-retries has an effect only with --schema, --validate, --avoid, "
                "--max-words or --max-chars"
            )
        return dict(self.kept)


def named_questions(given: Iterable[str]) -> dict[str, str]:
    """Returns the questions of texts NAME=TEXT by name. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in given:
        name, separator, question = text.partition("=")
        if not separator:
            raise ConfigError(f'--ask {text[:40]!r} must be NAME=TEXT, such as tags="List tags."')
        if name in found:
            raise ConfigError("--ask gives a name twice; names must differ")
        found[name] = str(text_value(f"--ask {name}", question))
    return found
