"""The option that writes what a command was given into a job file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions(Group):
    """The job file that keeps a command. The command writes it itself."""

    title: ClassVar[str] = "Run"

    save_job: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write this command into a job file. `mmdeploy-llm run` runs it again.",
        ),
    ] = None
