"""Options of which files of a folder are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from .groups import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(Group):
    """Which files of folders and globs are read, and what is told of the others."""

    title: ClassVar[str] = "Input"

    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="Leave out files and folders, such as '*_thumb.*' or 'drafts/**'. A pattern "
            "without / is of names, another of paths beneath the folder; may be repeated.",
        ),
    ] = None
    kinds: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="Only these kinds of media, such as image,audio. Others are told as skipped.  "
            "[default: all that the model takes]",
        ),
    ] = None
    animated: Annotated[
        str,
        typer.Option(
            metavar="image|video",
            hidden=True,
            help="What a GIF, WebP or PNG of several frames is: an image, of which the first frame "
            "is used, or a video.",
        ),
    ] = "image"
    skipped: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="List what is not read here. A line each, with the reason."
        ),
    ] = None
    dedupe: Annotated[
        str | None,
        typer.Option(
            metavar="bytes|pixels",
            help="Answer equal items once: files of the same bytes, or images of the same "
            "pixels. The answer is recorded for each.",
        ),
    ] = None
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            hidden=True,
            help="With --resume: remove the records of files that are certainly gone.",
        ),
    ] = False

    def to_settings(self) -> dict[str, Any]:
        """Returns the options of finding. Raises ConfigError for wrong ones."""
        from mmdeploy_llm.finding.options import FindingOptions

        names = ("exclude", "kinds", "animated", "skipped", "dedupe", "prune")
        return {"finding": FindingOptions.given({name: getattr(self, name) for name in names})}
