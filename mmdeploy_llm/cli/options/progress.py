"""Options of what a run tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class TellingChoices(Group):
    """Options of what a run tells while it runs."""

    title: ClassVar[str] = "Run"

    log_json: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Add a JSON object to this file for each event. These are started, loaded, "
            "progress, an item without its answer, finished and others.",
        ),
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns what the run tells."""
        from mmdeploy_llm.batch.progress.teller import TellingOptions

        return {"telling": TellingOptions(log_json=self.log_json)}
