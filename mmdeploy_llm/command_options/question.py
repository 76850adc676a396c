"""Options of the question."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionOptions(Group):
    """The question about every file, or every row of a corpus."""

    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            help="The question about each file, or each row of a corpus, with columns in it: "
            "'Describe {title}.'  "
            '[default: "Describe the image." / "Describe the video."]',
        ),
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns the question."""
        return {"question": self.prompt}
