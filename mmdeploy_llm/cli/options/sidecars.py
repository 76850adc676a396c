"""Options of the texts beside pictures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any, ClassVar

import typer

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarChoices(Group):
    """The texts beside pictures."""

    title: ClassVar[str] = "Output"

    sidecar: Annotated[
        str | None,
        typer.Option(
            metavar="SUFFIX",
            help="Write each answer beside its picture: .txt makes a.txt for a.jpg. Failed and "
            "empty answers write none; what is not written is told.",
        ),
    ] = None
    on_existing: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            hidden=True,
            help="A text that is there: skip, overwrite or append.  [default: skip]",
        ),
    ] = None
    trigger: Annotated[
        list[str] | None,
        typer.Option(
            metavar="WORDS",
            hidden=True,
            help="Words that each text beside a picture begins with; may be repeated.",
        ),
    ] = None
    sidecar_template: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            hidden=True,
            help="The text, with {text}, answers and --columns by name, {trigger}, {file}, {stem} "
            "and {folder}.  [default: {text}]",
        ),
    ] = None
    sidecar_prefix: Annotated[
        str | None, typer.Option(metavar="TEXT", hidden=True, help="What stands before the text.")
    ] = None
    sidecar_suffix: Annotated[
        str | None, typer.Option(metavar="TEXT", hidden=True, help="What stands after the text.")
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns which texts are written beside pictures."""
        from mmdeploy_llm.data.outputs.sidecars.options import SidecarOptions

        return {"sidecars": SidecarOptions.given(asdict(self))}
