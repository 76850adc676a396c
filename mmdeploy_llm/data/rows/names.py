"""Names of files: media, URLs, their natural order, and globs in which `**` stands for any folders,
each visited once, whatever links lead to it: the standard library follows a loop of links forty
times, and two loops without an end."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator

from mmdeploy_llm.hooks import KindTable
from mmdeploy_llm.hooks.kinds import table_of
from mmdeploy_llm.messages import MediaRef

BUILT_IN_KINDS = table_of(())  # the kinds that are known without any plugin


def is_url(name: str) -> bool:
    """Returns whether the name of a media item or a corpus is a URL rather than a path."""
    return bool(MediaRef(kind="", uri=name).scheme)


def is_media_name(name: str, kinds: KindTable) -> bool:
    """Returns whether a folder or glob yields a file of this name, which is of one of the kinds."""
    return is_visible(name) and kinds.of_name(name) is not None


def is_visible(name: str) -> bool:
    """Returns whether a folder shows a file of this name."""
    return not os.path.basename(name).startswith(".")


def natural_key(name: str) -> tuple[list[str | int], str]:
    """Returns a sort key: digits compare by value, letters ignore case, ties go by the name."""
    chunks = re.split(r"(\d+)", name.casefold())
    # Digits are at odd indices, so text is compared with text and numbers with numbers.
    return [int(chunk) if index % 2 else chunk for index, chunk in enumerate(chunks)], name


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
