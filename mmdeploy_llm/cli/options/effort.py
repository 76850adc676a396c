"""Options of how much is run at once, and when a run gives up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.engine.desk.deaths import ENGINE_RESTARTS

from .groups import Group
from .model import NumThreads

MaxNumSeqs = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", hidden=True, help="Upper limit of items that run at the same time."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortOptions(Group):
    """How much is run at once, and when a run gives up."""

    title: ClassVar[str] = "Run"

    max_failures: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", hidden=True, help="Stop after N failed items in this run."
        ),
    ] = None
    engine_restarts: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="K",
            hidden=True,
            help="How often in a row an engine that died is started again. Its items are done "
            "again; one that was there at two deaths is done alone.",
        ),
    ] = ENGINE_RESTARTS
    max_num_seqs: MaxNumSeqs = None
    num_threads: NumThreads = None
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            hidden=True,
            help="Answer with engines on all machines of a Ray cluster: HOST:PORT, auto (the "
            "cluster of this machine) or local (a new one). Media paths must be readable on each "
            "of them.",
        ),
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns when a run gives up. A Ray cluster starts its engines again by itself."""
        restarts = self.engine_restarts if self.ray is None else 0
        return {"max_failures": self.max_failures, "engine_restarts": restarts}

    def to_engine(self) -> dict[str, Any]:
        """Returns the numbers of sequences and threads."""
        return {"max_num_seqs": self.max_num_seqs, "num_threads": self.num_threads}
