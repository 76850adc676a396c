"""Options of an estimate."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import typer

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimateOptions(Group):
    """Whether a run is estimated instead. A command reads them itself."""

    title: ClassVar[str] = "Run"

    estimate: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Answer N random items, say what all will take, and stop. Nothing is written but "
            "a small report, NAME.estimate.html. 20 is a good N; more make it more exact.",
        ),
    ] = None
    estimate_seed: Annotated[
        int,
        typer.Option(hidden=True, metavar="SEED", help="Which random items --estimate draws."),
    ] = 0
