"""Ids of files: their paths beneath the input's root, so that a run that is resumed from another
working folder, by an absolute path or through a link knows them again.

The root is the folder that holds everything the caller has named, links resolved:

    photos/                 the folder photos      id: sub/1.png
    a.png b/ "c/*.png"      their common folder    ids: a.png, b/2.png, c/3.png

It stands in the configuration file of an output. A later run that names other folders counts from
the same root: ../d/4.png.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from .walk import Place, base_path


def common_root(paths: Iterable[str]) -> str:
    """Returns the folder that holds all of these files, folders and globs."""
    return os.path.commonpath([base_path(path) for path in paths])


class Ids:
    """The ids of files beneath a root, which need not exist any more."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._prefixes: dict[str, str] = {}

    def of(self, place: Place) -> str:
        """Returns the id of a file."""
        if place.base not in self._prefixes:
            prefix = os.path.relpath(place.base, self.root)
            self._prefixes[place.base] = "" if prefix == "." else f"{prefix}/"
        return os.path.normpath(self._prefixes[place.base] + place.relative)


def real_place(path: str) -> str:
    """Returns a path with the links of its folder resolved, not its own."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder or "."), name)
