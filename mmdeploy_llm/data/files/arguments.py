"""FindingArguments, PageArguments: options of calls about files, which signatures show, and of
commands."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from mmdeploy_llm.values.options.flags import Flag

DPI = (1, 2400)
PAGES = (
    "Pages of each document, such as 1-5,8,-1; -1 is the last, 8- all from the eighth on. What a "
    "document does not have of them is left out."
)


class FindingArguments(TypedDict, total=False):
    """Arguments of `LLM.run_batch` about which files are read.

    exclude: patterns of files and folders that are left out, such as "*.tmp" or "drafts/**".
    kinds: of media that are read, such as ["image", "audio"] or "image,audio"; None: all that the
        model takes.
    animated: what images of several frames are: "image" (the first frame) or "video".
    skipped: file for the list of what is not read, with the reasons.
    prune: whether records of files that are certainly gone are removed; needs resume.
    dedupe: "bytes" or "pixels": items that ask the same about files of the same bytes, or images of
        the same pixels, are answered once, and the answer is recorded for each.
    """

    exclude: Annotated[
        str | Sequence[str],
        Flag(
            "Leave out files and folders, such as '*_thumb.*' or 'drafts/**'. A pattern without / "
            "is of names, another of paths beneath the folder; may be repeated.",
            metavar="GLOB",
            type=list[str],
        ),
    ]
    kinds: Annotated[
        str | Sequence[str] | None,
        Flag(
            "Only these kinds of media, such as image,audio. Others are told as skipped.  "
            "[default: all that the model takes]",
            metavar="A,B",
        ),
    ]
    animated: Annotated[
        str,
        Flag(
            "What a GIF, WebP or PNG of several frames is: an image, of which the first frame is "
            "used, or a video.",
            metavar="image|video",
            is_rare=True,
            default="image",
        ),
    ]
    skipped: Annotated[
        str | os.PathLike[str] | None,
        Flag(
            "List what is not read here. A line each, with the reason.",
            metavar="FILE",
            is_rare=True,
            type=Path,
        ),
    ]
    dedupe: Annotated[
        str | None,
        Flag(
            "Answer equal items once: files of the same bytes, or images of the same pixels. The "
            "answer is recorded for each.",
            metavar="bytes|pixels",
        ),
    ]
    prune: Annotated[
        bool,
        Flag("With --resume: remove the records of files that are certainly gone.", is_rare=True),
    ]


class DrawingArguments(TypedDict, total=False):
    """Arguments about how pages of documents are drawn."""

    dpi: Annotated[
        float | None,
        Flag(
            "Draw pages with at most N pixels for an inch. No more are drawn than the model sees "
            "(--image-tokens).  [default: of the preset, 200]",
            metavar="N",
            is_rare=True,
            min=DPI[0],
            max=DPI[1],
        ),
    ]
    password: Annotated[
        str | None,
        Flag("Password of encrypted documents, or @FILE.", metavar="TEXT", is_rare=True),
    ]


class PageArguments(DrawingArguments, total=False):
    """Arguments of `LLM.run_batch` about documents.

    by_page: whether each page of a document is an item of its own, with the id
        "report.pdf#page=3". pages: of each document, such as "1-5,8,-1"; dpi, password: of
        documents; these need by_page.
    """

    by_page: Annotated[
        bool,
        Flag("Ask about each page of a document: pages are items, such as report.pdf#page=3."),
    ]
    pages: Annotated[str | None, Flag(f"With --by-page: {PAGES}", metavar="RANGES", is_rare=True)]
