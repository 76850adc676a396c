"""Counts the files of an input for a first line, in the time that such a line has."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator

LONGEST = 0.1  # seconds


def files_so_far(
    paths: Iterable[str], seconds: float = LONGEST, *, limit: int | None = None
) -> str:
    """Returns how many files the paths are or have in them, such as "40 files"; those that were
    counted in this time, such as "9000 files so far"; "" without any. Hidden ones, and what is no
    file or folder, such as a URL or a glob, are not counted. What a file is nobody has looked at.
    limit: of those that are done, "3 of 40 files"; None: all.
    """
    end, count, is_whole = time.perf_counter() + seconds, 0, True
    for _ in _files(paths):
        count += 1
        if time.perf_counter() > end:
            is_whole = False
            break
    words = f"{count} file{'s' * (count != 1)}{'' if is_whole else ' so far'}"
    if limit is not None and limit < count:
        words = f"{limit} of {words}"
    return words if count else ""


def _files(paths: Iterable[str]) -> Iterator[None]:
    """Yields once for each file."""
    for path in paths:
        if os.path.isfile(path):
            yield
        for _, folders, names in os.walk(path):  # of a file or of nothing there is none
            folders[:] = [name for name in folders if not name.startswith(".")]
            yield from (None for name in names if not name.startswith("."))
