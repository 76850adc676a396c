"""Options of how much is run at once, and when a run gives up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.batch.arguments import RunArguments
from mmdeploy_llm.values.options.engine_flags import EngineFlags

from .groups import Given, Group, Rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EffortOptions(Group):
    """How much is run at once, and when a run gives up."""

    title: ClassVar[str] = "Run"

    giving_up: Annotated[Given, Rows(RunArguments, "max_failures", "engine_restarts")]
    at_once: Annotated[Given, Rows(EngineFlags, "max_num_seqs", "num_threads")]
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

    def to_batch(self) -> dict[str, Any]:
        """Returns when a run gives up. A Ray cluster starts its engines again by itself."""
        return {**self.giving_up, **({} if self.ray is None else {"engine_restarts": 0})}
