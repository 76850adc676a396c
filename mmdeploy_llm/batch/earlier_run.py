"""Finds the files of an earlier run again: by ids that are counted from the root of that run, and
the records whose files are gone."""

from __future__ import annotations

import os
from itertools import islice
from typing import TYPE_CHECKING

from mmdeploy_llm.data.outputs.base import Sink
from mmdeploy_llm.data.outputs.scan import DROPPED
from mmdeploy_llm.data.records.identity import digest_of, file_state
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError

if TYPE_CHECKING:
    from .file_source import FileSource


class MissingFiles:
    """Says which files are missing, by their ids. root: what ids are relative to."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._known: dict[str, bool] = {}

    def check_root(self) -> None:
        """Raises ConfigError when the root is not there, or is empty: then nothing is certain."""
        if not _shows_files(self._root):
            raise ConfigError(
                f"--prune: the folder of the input, {self._root!r}, is missing or empty, as a disk "
                "is that is not mounted; no record is removed"
            )

    def is_gone(self, own: str) -> bool:
        """Returns whether the file with this id is certainly gone."""
        path = os.path.normpath(os.path.join(self._root, own))
        try:
            os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return self._is_certain(os.path.dirname(path) or ".")
        except (OSError, ValueError):
            return False
        return False

    def _is_certain(self, folder: str) -> bool:
        if folder not in self._known:
            is_beneath = folder.startswith(os.path.join(self._root, ""))
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


MAX_COMPARED = 1000  # records that tell a folder that was moved from another one


def known_again(source: FileSource, sink: Sink, *, is_pruned: bool) -> Leftovers:
    """Gives the files of a resumed run their ids of before; returns the records without a file."""
    settle_ids(source, sink)
    return Leftovers(source, is_pruned=is_pruned)


def settle_ids(source: FileSource, sink: Sink) -> None:
    """Gives the files of a resumed run the ids that they have in its output.

    The output's own root counts. Where it does not exist any more and the files are the same, with
    size and time, the folder was moved, and the new root counts.
    """
    root = sink.configurations.root
    if root is None or root == source.root:
        return
    if os.path.isdir(root) or not _is_moved(source, sink):
        source.use_root(root)


def _is_moved(source: FileSource, sink: Sink) -> bool:
    """Whether any record is of a file that is the same beneath the new root."""
    records = (entry.record for entry in sink.entries())
    ours = (record for record in records if source.file_of(record) is not None)
    return any(
        record.item_digest == digest_of(file_state(source.file_of(record) or ""))
        for record in islice(ours, MAX_COMPARED)
    )


class Leftovers:
    """The records of an output whose files, or pages of these, are gone.

    is_pruned: whether they are removed. ids: those that were met.
    """

    def __init__(self, source: FileSource, *, is_pruned: bool) -> None:
        """Raises ConfigError when records are to be removed and nothing is certain."""
        self._source, self.is_pruned = source, is_pruned
        self._missing = MissingFiles(source.root)
        if is_pruned:
            self._missing.check_root()
        self.ids: set[str] = set()

    def place_of(self, record: Record) -> int | None:
        """Returns what the source's place_of does; DROPPED for a record that is removed: always
        for one that other items replace."""
        own, fate = str(record.id), self._source.fate_of(record)
        if fate == "replaced":
            return DROPPED
        is_ours = record.path is None or self._source.file_of(record) is not None
        is_there = is_ours or not self._missing.is_gone(self._source.file_id(own))
        if is_there and fate == "kept":
            return self._source.place_of(record)
        self.ids.add(own)
        return DROPPED if self.is_pruned else None
