"""Tells that paths of media or the name of a corpus name nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence

CORPORA = (
    "give a JSONL, CSV, TSV, Parquet, Arrow or tar file, a glob or folder of them, a Lance table, "
    "a Hugging Face dataset or a folder of media"
)


def is_gone(path: str) -> bool:
    """Whether a path names one file or folder, which does not exist. Names may have brackets."""
    return not (os.path.lexists(path) or "*" in path or "?" in path)


def nowhere(given: Sequence[str]) -> str:
    """Returns why nothing was found where no path exists."""
    if len(given) <= 1:
        path = given[0] if given else ""
        return f"{path!r} does not exist; give files, folders or globs of media"
    return (
        f"none of the {len(given)} paths exists, such as {given[0]!r}; relative ones begin in "
        f"the working folder, {os.getcwd()!r}"
    )


def no_corpus(name: str) -> str:
    """Returns that there is no corpus of this name, and what may be given."""
    return f"{name!r} does not exist; {CORPORA}"
