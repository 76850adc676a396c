"""FindingArguments, PageArguments: options of calls about files, which signatures show."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict


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

    exclude: str | Sequence[str]
    kinds: str | Sequence[str] | None
    animated: str
    skipped: str | os.PathLike[str] | None
    prune: bool
    dedupe: str | None


class PageArguments(TypedDict, total=False):
    """Arguments of `LLM.run_batch` about documents.

    by_page: whether each page of a document is an item of its own, with the id
        "report.pdf#page=3". pages: of each document, such as "1-5,8,-1"; dpi, password: of
        documents; these need by_page.
    """

    by_page: bool
    pages: str | None
    dpi: float | None
    password: str | None
