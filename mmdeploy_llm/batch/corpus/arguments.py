"""ColumnArguments: options of calls about columns, which signatures show, and of commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypedDict

from mmdeploy_llm.values.options.flags import Flag


class ColumnArguments(TypedDict, total=False):
    """Arguments of `LLM.run_batch` that name columns. media_column: of any kind, {kind: column}, a
    list for several. columns: those that records repeat."""

    image_column: Annotated[
        str | None,
        Flag(
            "Column with images. It has bytes, paths, or structs of Hugging Face datasets.  "
            "[default: the only one with media]",
            metavar="NAME",
        ),
    ]
    video_column: Annotated[
        str | None,
        Flag("Column with videos, as for --image-column.", metavar="NAME", is_rare=True),
    ]
    audio_column: Annotated[
        str | None, Flag("Column with sound, as for --image-column.", metavar="NAME", is_rare=True)
    ]
    media_column: Annotated[
        Mapping[str, str | Sequence[str]],
        Flag(
            "Column with media of any kind, such as pdf=scan. May be repeated; several of one kind "
            "are asked about together.",
            metavar="KIND=NAME",
            is_rare=True,
            type=list[str],
        ),
    ]
    prompt_column: Annotated[
        str | None,
        Flag("Column with the question, instead of --prompt.", metavar="NAME", is_rare=True),
    ]
    id_column: Annotated[
        str | None,
        Flag(
            "Column with the id. In tars it is shard and key.  [default: id, else the row]",
            metavar="NAME",
            is_rare=True,
        ),
    ]
    columns: Annotated[
        Sequence[str],
        Flag("Columns that each record repeats, with commas; * for all.", metavar="A,B"),
    ]
