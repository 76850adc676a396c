"""Options of the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

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
            "'Describe {title}.'  [default: Describe the image. / Describe the video.]",
        ),
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns the question."""
        return {"question": self.prompt}
