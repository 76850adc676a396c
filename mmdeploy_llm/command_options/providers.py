"""Options of which plugins serve a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderOptions(Group):
    """Which plugins serve a model."""

    title: ClassVar[str] = "Model"

    use: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PLUGIN",
            hidden=True,
            help="Which plugin serves what several could, by the name of an architecture, parser "
            "or kind of media, such as AcmeForCausalLM=acme. May be repeated.",
        ),
    ] = None

    def to_engine(self) -> dict[str, Any]:
        """Returns the choice of plugins."""
        return {"use": self.use}
