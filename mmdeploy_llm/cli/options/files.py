"""Options of which files of a folder are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from mmdeploy_llm.data.files.page_choice import DPI

from .groups import Group
from .values import text_value

ByPage = Annotated[
    bool,
    typer.Option(
        "--by-page",
        help="Ask about each page of a document: pages are items, such as report.pdf#page=3.",
    ),
]
PAGES = (
    "Pages of each document, such as 1-5,8,-1; -1 is the last, 8- all from the eighth on. What a "
    "document does not have of them is left out."
)
Pages = Annotated[
    str | None, typer.Option(metavar="RANGES", hidden=True, help=f"With --by-page: {PAGES}")
]
Dpi = Annotated[
    float | None,
    typer.Option(
        hidden=True,
        min=DPI[0],
        max=DPI[1],
        metavar="N",
        help="Draw pages with at most N pixels for an inch. No more are drawn than the model "
        "sees (--image-tokens).  [default: of the preset, 200]",
    ),
]
Password = Annotated[
    str | None,
    typer.Option(metavar="TEXT", hidden=True, help="Password of encrypted documents, or @FILE."),
]


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
            metavar="FILE",
            hidden=True,
            help="List what is not read here. A line each, with the reason.",
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
        from mmdeploy_llm.data.files.options import FindingOptions

        return {"finding": FindingOptions.given(self.to_finding())}

    def to_finding(self) -> dict[str, Any]:
        """Returns arguments of FindingOptions.given."""
        names = ("exclude", "kinds", "animated", "skipped", "dedupe", "prune")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedPages(Group):
    """Whether pages of documents are items of their own, and how they are drawn."""

    title: ClassVar[str] = "Input"

    by_page: ByPage = False
    pages: Pages = None
    dpi: Dpi = None
    password: Password = None

    def to_finding(self) -> dict[str, Any]:
        """Returns arguments of FindingOptions.given."""
        password = text_value("--password", self.password)
        return {
            "by_page": self.by_page,
            "pages": self.pages,
            "dpi": self.dpi,
            "password": password,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedFileOptions(Group):
    """Which files are read, and whether pages of documents are items of their own."""

    files: FileOptions
    pages: CountedPages

    def to_settings(self) -> dict[str, Any]:
        """Returns the options of finding. Raises ConfigError for wrong ones."""
        from mmdeploy_llm.data.files.options import FindingOptions

        given = {**self.files.to_finding(), **self.pages.to_finding()}
        return {"finding": FindingOptions.given(given)}
