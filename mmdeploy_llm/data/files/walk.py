"""Walks over folders and globs; yields the regular files in them, and counts the rest. Ids of files
are their paths beneath the input's root, so that a run that is resumed from another working folder,
by an absolute path or through a link knows them again.

The root is the folder that holds everything the caller has named, links resolved:

    photos/                 the folder photos      id: sub/1.png
    a.png b/ "c/*.png"      their common folder    ids: a.png, b/2.png, c/3.png

It stands in the configuration file of an output. A later run that names other folders counts from
the same root: ../d/4.png.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mmdeploy_llm.data.rows.files import base_of
from mmdeploy_llm.data.rows.names import expand_glob, is_visible, natural_key

from .names import Patterns, system_name
from .skipped import Skip, Skipped

REPORT_SCRIPT = "cards-001.js"  # beside the pictures of a large report
NOT_DEEP = "--no-recursive leaves it out"
IS_REPORT = "it has the pictures of a report"
IS_LINK = "links to folders are not followed"
NOT_REGULAR = "it is a FIFO, a socket or a device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A file that was found. path: as its folder was named. base: the real path of what was named,
    which does not depend on links and the working folder. relative: its path beneath the base."""

    path: str
    base: str
    relative: str

    @property
    def real_path(self) -> str:
        """Its path with the links of what was named resolved: one for each file."""
        return os.path.normpath(os.path.join(self.base, self.relative))


def base_path(path: str) -> str:
    """Returns the real path of the folder that a caller has named, that holds a file, or from which
    a glob searches."""
    if os.path.isdir(path):
        return os.path.realpath(path)
    is_there = os.path.lexists(path)
    return os.path.realpath((os.path.dirname(path) if is_there else base_of(path)) or ".")


class Walker:
    """Finds files within rules; adds what it passes over to `skipped`."""

    def __init__(self, skipped: Skipped, exclude: Patterns, *, is_recursive: bool) -> None:
        self._skipped, self._exclude, self._is_recursive = skipped, exclude, is_recursive

    def file(self, path: str, *, is_alone: bool) -> Iterator[Place]:
        """Yields a file that the caller has named. is_alone: it is taken whatever its name is."""
        name = os.path.basename(path)
        if is_alone or not self._is_left_out(path, name, name, is_folder=False, is_named=True):
            yield Place(path=path, base=base_path(path), relative=name)

    def gone(self, path: str) -> Place:
        """Returns the place of a file that the caller has named and that does not exist."""
        folder, name = os.path.split(os.path.normpath(path))
        return Place(path=path, base=os.path.realpath(folder or "."), relative=name)

    def folder(self, path: str, *, is_alone: bool) -> Iterator[Place]:
        """Yields the files of a folder that the caller has named, in natural order, then those of
        its subfolders."""
        name = os.path.basename(os.path.normpath(path))
        if is_alone or not self._is_left_out(path, name, name, is_folder=True, is_named=True):
            self._skipped.read_too(path)
            yield from self._walk(path, base_path(path), "")

    def glob(self, pattern: str) -> Iterator[Place]:
        """Yields the files that a glob matches, and those of the folders that it matches; `**`
        matches across folders."""
        begin, base = base_of(pattern), base_path(pattern)
        is_deep = "**" in pattern  # then subfolders are matched themselves
        names = expand_glob(pattern, self._unlisted)
        for path in sorted(names, key=natural_key):
            relative = path.removeprefix(begin).strip("/")
            is_folder = os.path.isdir(path)
            if self._is_path_left_out(path, relative, is_folder=is_folder):
                continue
            if is_folder:
                prefix = f"{relative}/" if relative else ""
                yield from self._walk(path, base, prefix, is_deep=is_deep)
            elif self._is_regular(path):
                yield Place(path=path, base=base, relative=relative)

    def _walk(
        self, folder: str, base: str, relative: str, *, is_deep: bool = False
    ) -> Iterator[Place]:
        todo = [(folder, relative)]
        while todo:
            path, prefix = todo.pop()
            try:
                with os.scandir(path or ".") as listed:
                    entries = sorted(listed, key=lambda entry: natural_key(entry.name))
            except OSError as error:
                self._unlisted(path, error)
                continue
            if any(entry.name == REPORT_SCRIPT for entry in entries):
                self._skip(path, "folder of a report", IS_REPORT, True, is_usual=True)
                continue
            folders = []
            for entry in entries:
                own = f"{prefix}{entry.name}"
                kind = self._kind(entry, own)
                if kind == "folder" and self._is_recursive:
                    folders.append((entry.path, f"{own}/"))
                elif kind == "folder" and not is_deep:
                    self._skip(entry.path, "subfolder", NOT_DEEP, True, is_usual=True)
                elif kind == "file":
                    yield Place(path=entry.path, base=base, relative=own)
            todo += reversed(folders)

    def _kind(self, entry: os.DirEntry[str], relative: str) -> str:
        """Returns "file" or "folder" for an entry that is read; skips it else."""
        try:
            is_folder = entry.is_dir()
            if self._is_left_out(entry.path, entry.name, relative, is_folder=is_folder):
                return ""
            if is_folder and entry.is_symlink():
                self._skip(entry.path, "linked folder", IS_LINK, True, is_usual=True)
            elif is_folder:
                return "folder"
            elif entry.is_file():
                return "file"
            else:
                self._odd(entry.path)
        except OSError as error:
            self._skip(entry.path, "unreadable", f"it cannot be read: {error.strerror}")
        return ""

    def _is_regular(self, path: str) -> bool:
        if os.path.isfile(path):
            return True
        self._odd(path)
        return False

    def _odd(self, path: str) -> None:
        """Skips what is no regular file."""
        try:
            is_there = stat.S_IFMT(os.stat(path).st_mode) != 0
        except OSError:
            is_there = False
        if is_there:
            self._skip(path, "special file", NOT_REGULAR)
        else:
            self._skip(path, "broken link", "what the link leads to does not exist")

    def _is_path_left_out(self, path: str, relative: str, *, is_folder: bool) -> bool:
        """Whether a match of a glob, or a folder that leads to it, is left out; such a folder is
        counted with each match in it."""
        names = relative.split("/")
        return any(
            self._is_left_out(
                path,
                name,
                "/".join(names[:at]),
                is_folder=is_folder or at < len(names),
                is_named=True,
            )
            for at, name in enumerate(names, 1)
        )

    def _is_left_out(
        self, path: str, name: str, relative: str, *, is_folder: bool, is_named: bool = False
    ) -> bool:
        """Whether the rules leave a file or folder out by its name. is_named: it may be hidden."""
        label = system_name(name)
        if label is not None:
            words = "it belongs to a system or a storage box"
            self._skip(path, label, words, is_folder and os.path.isdir(path), is_usual=True)
        elif not is_named and not is_visible(name):
            noun = "hidden folder" if is_folder else "hidden file"
            self._skip(path, noun, "its name begins with a dot", is_folder, is_usual=True)
        elif pattern := self._exclude.match(relative, is_folder=is_folder):
            words = f"--exclude {pattern!r} leaves it out"
            is_folder = is_folder and os.path.isdir(path)
            self._skip(path, f"by --exclude {pattern}", words, is_folder, is_usual=True)
        else:
            return False
        return True

    def _unlisted(self, path: str, error: OSError) -> None:
        self._skipped.not_read(path)
        self._skip(path, "unreadable folder", f"it cannot be listed: {error.strerror}", True)

    def _skip(
        self,
        path: str,
        label: str,
        reason: str,
        is_folder: bool = False,
        *,
        is_usual: bool = False,
    ) -> None:
        name = os.path.normpath(path) + ("/" if is_folder else "")
        self._skipped.add(Skip(path=name, label=label, reason=reason, is_usual=is_usual))


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
