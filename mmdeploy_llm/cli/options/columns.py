"""Options of `batch` that name columns of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.errors import ConfigError

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
    audio_column: Annotated[
        str | None,
        typer.Option(metavar="NAME", hidden=True, help="Column with sound, as for --image-column."),
    ] = None
    media_column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND=NAME",
            hidden=True,
            help="Column with media of any kind, such as pdf=scan. May be repeated; several of one "
            "kind are asked about together.",
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
            audio=self.audio_column,
            media=tuple(map(_kind_and_name, self.media_column or ())),
            prompt=self.prompt_column,
            id=self.id_column,
            carried=carried,
        )
        return {"columns": columns}


def _kind_and_name(text: str) -> tuple[str, str]:
    """Reads KIND=NAME. Raises ConfigError for another text."""
    kind, separator, name = text.partition("=")
    if not (separator and kind and name):
        raise ConfigError(f"--media-column {text!r} must be KIND=NAME, such as audio=sound")
    return kind, name
