"""Tells that paths of media name nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence


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
