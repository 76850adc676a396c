"""The option that reads boxes in answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxOptions(Group):
    """The boxes that models write in answers about a picture."""

    title: ClassVar[str] = "Question and answer"

    boxes: Annotated[
        bool,
        typer.Option(
            "--boxes",
            hidden=True,
            help="Read the boxes in answers about one picture into `boxes` of each record, in "
            "pixels of the picture, upright. The report draws them, and `mmdeploy-llm export` "
            "writes COCO and YOLO. The question must ask for boxes as the model writes them.",
        ),
    ] = False

    def to_settings(self) -> dict[str, Any]:
        """Returns whether boxes are read."""
        return {"boxes": self.boxes}
