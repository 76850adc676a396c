"""Options of which items of an input are done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from .groups import Group

Recursive = Annotated[
    bool,
    typer.Option(
        "--recursive/--no-recursive",
        "-r",
        hidden=True,
        help="Whether folders are read with their subfolders.",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Process only the first N lines or files.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionOptions(Group):
    """Which items of an input are done."""

    title: ClassVar[str] = "Input"

    recursive: Recursive = True
    limit: Limit = None
    shard: Annotated[
        str | None,
        typer.Option(
            metavar="I/N|auto",
            help="Every N-th item from the I-th on: N runs share the input. "
            "auto: as torchrun, SLURM or an indexed job of Kubernetes numbers this process; the "
            "shard then stands in the output's name.",
        ),
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns the selected lines, and whether folders are read with their subfolders."""
        from mmdeploy_llm.records.ids import Selection

        return {
            "selection": Selection.parse(self.shard, self.limit),
            "is_recursive": self.recursive,
        }
