"""Gone: says of which files it is certain that they are gone, and not only out of reach.

A disk that is not mounted leaves an empty folder, or none; a folder that cannot be listed says
nothing. So a file counts as gone only when the nearest folder above it that exists shows other
files, and this folder is the root or lies beneath it.
"""

from __future__ import annotations

import os

from mmdeploy_llm.errors import ConfigError


class Gone:
    """Asks about files by their ids. root: what ids are relative to; None: they are paths, and the
    folder itself of a file must be there."""

    def __init__(self, root: str | None) -> None:
        self._root = root
        self._known: dict[str, bool] = {}

    def check_root(self) -> None:
        """Raises ConfigError when the root is not there, or is empty: then nothing is certain."""
        if self._root is not None and not _shows_files(self._root):
            raise ConfigError(
                f"--prune: the folder of the input, {self._root!r}, is missing or empty, as a disk "
                "is that is not mounted; no record is removed"
            )

    def is_gone(self, own: str) -> bool:
        """Returns whether the file with this id is certainly gone."""
        path = os.path.normpath(os.path.join(self._root or "", own))
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return self._is_certain(os.path.dirname(path) or ".")
        except (OSError, ValueError):
            return False
        return False

    def _is_certain(self, folder: str) -> bool:
        if folder not in self._known:
            is_beneath = self._root is not None and folder.startswith(os.path.join(self._root, ""))
            if is_beneath and not os.path.lexists(folder):
                self._known[folder] = self._is_certain(os.path.dirname(folder))
            else:
                self._known[folder] = _shows_files(folder)
        return self._known[folder]


def _shows_files(folder: str) -> bool:
    """Whether a folder can be listed and is not empty."""
    try:
        with os.scandir(folder) as entries:
            return next(entries, None) is not None
    except OSError:
        return False
