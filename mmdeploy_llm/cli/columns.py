"""Options of `batch` that name columns of a corpus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from mmdeploy_llm.batch.corpus.columns import ColumnOptions

ImageColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Column with images: bytes, paths, or the struct of Hugging Face datasets.  "
        "[default: the only one that has images or videos]",
    ),
]
VideoColumn = Annotated[
    str | None, typer.Option(metavar="NAME", help="Column with videos, as for --image-column.")
]
PromptColumn = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Column with the question, instead of --prompt."),
]
IdColumn = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Column with the id.  [default: id, else the row's number; in tars shard and key]",
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(metavar="A,B", help="Columns that each record repeats, with commas between."),
]


def column_options(options: Mapping[str, Any]) -> ColumnOptions:
    """Builds the options from those of a command; `caption` has none of them."""
    from mmdeploy_llm.batch.corpus.columns import ColumnOptions

    carried = (options.get("columns") or "").split(",")
    return ColumnOptions(
        image=options.get("image_column"),
        video=options.get("video_column"),
        prompt=options.get("prompt_column"),
        id=options.get("id_column"),
        carried=tuple(name.strip() for name in carried if name.strip()),
    )
