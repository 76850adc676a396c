"""Expands globs in which `**` stands for any folders, each folder visited once, whatever links lead
to it: the standard library follows a loop of links forty times, and two loops without an end."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator

from .names import is_visible

ANY_FOLDERS = "**"


OnError = Callable[[str, OSError], None]


def expand_glob(pattern: str, on_error: OnError = lambda *_: None) -> Iterator[str]:
    """Yields the paths that a glob matches, each once, in any order. on_error: gets each folder in
    the place of `**` that cannot be listed, which is passed over."""
    yield from dict.fromkeys(_matches(pattern.split("/"), on_error))


def _matches(parts: list[str], on_error: OnError) -> Iterator[str]:
    if ANY_FOLDERS not in parts:
        yield from glob.iglob("/".join(parts))
        return
    at = parts.index(ANY_FOLDERS)
    rest = parts[at + 1 :] or ["*"]
    begin = "/".join([*parts[:at], ""])  # ends in "/", or is "" for the working folder
    for top in glob.iglob(begin) if begin else ("",):
        for folder in _folders(top, on_error):
            fixed = glob.escape(folder.rstrip("/")).split("/") if folder else []
            yield from _matches([*fixed, *rest], on_error)


def _folders(top: str, on_error: OnError) -> Iterator[str]:
    """Yields a folder and the visible ones beneath it, those that are reached without a link
    first."""
    met: set[tuple[int, int]] = set()
    todo, links = [top], list[str]()
    while todo or links:
        folder = todo.pop() if todo else links.pop(0)
        try:
            state = os.stat(folder or ".")
            entries = list(os.scandir(folder or "."))
        except OSError as error:  # gone, or not readable
            on_error(folder, error)
            continue
        if (state.st_dev, state.st_ino) in met:
            continue
        met.add((state.st_dev, state.st_ino))
        yield folder
        for entry in entries:
            if is_visible(entry.name) and entry.is_dir():
                where = links if entry.is_symlink() else todo
                where.append(os.path.join(folder, entry.name))
