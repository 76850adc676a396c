"""Options of `batch` that name columns of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnChoices(Group):
    """Options of `batch` that name columns of a corpus."""

    title: ClassVar[str] = "Columns of a corpus"

    image_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Column with images. It has bytes, paths, or structs of Hugging Face datasets.  "
            "[default: the only one with media]",
        ),
    ] = None
    video_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", hidden=True, help="Column with videos, as for --image-column."
        ),
    ] = None
    prompt_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", hidden=True, help="Column with the question, instead of --prompt."
        ),
    ] = None
    id_column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            hidden=True,
            help="Column with the id. In tars it is shard and key.  [default: id, else the row]",
        ),
    ] = None
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Columns that each record repeats, with commas; * for all."
        ),
    ] = None

    def to_settings(self) -> dict[str, Any]:
        """Returns the columns."""
        from mmdeploy_llm.batch.corpus.columns import ColumnOptions

        carried = tuple(name.strip() for name in (self.columns or "").split(",") if name.strip())
        columns = ColumnOptions(
            image=self.image_column,
            video=self.video_column,
            prompt=self.prompt_column,
            id=self.id_column,
            carried=carried,
        )
        return {"columns": columns}
