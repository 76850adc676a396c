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
            help="Say what all will take, from N random items. Only these are answered, and only "
            "a small report is written, NAME.estimate.html. 20 is a good N; more make it more "
            "exact.",
        ),
    ] = None
    estimate_seed: Annotated[
        int,
        typer.Option(hidden=True, metavar="SEED", help="Which random items --estimate draws."),
    ] = 0

    @property
    def draw(self) -> dict[str, int]:
        """The number of items and the seed, as arguments of `estimate`."""
        return {"num_items": self.estimate or 1, "seed": self.estimate_seed}
