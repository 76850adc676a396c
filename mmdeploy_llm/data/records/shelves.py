"""Shelves: where the complete parts of an output are, in a folder or at a URL of fsspec."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar

from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.rows.files import remote_folder
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable import files

BLOCK_BYTES = 2**16  # read ahead at a URL: headers of tars and footers of Parquet are small
Value = TypeVar("Value")


class Shelf(Protocol):
    """A place for complete parts. name: for messages."""

    name: str

    def states(self) -> Mapping[str, object]:
        """Returns the names there, each with what changes when its file does."""

    def open(self, name: str) -> IO[bytes]:
        """Opens a file there for reading, at any place."""

    def take(self, folder: Folder, name: str, part: str) -> object:
        """Moves a file of a folder here, where it replaces `part`: completely or not at all.
        Returns its state, as `states` does."""

    def remove(self, name: str) -> None:
        """Removes a file."""


class LocalShelf:
    """A folder of this machine. Links in it are neither followed nor counted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.name = str(path)

    def states(self) -> Mapping[str, object]:
        """Returns identity, size and time of the files, none when there is no folder."""
        if not self._path.is_dir():
            return {}
        with Folder.open(self._path) as folder:
            return folder.states()

    def open(self, name: str) -> IO[bytes]:
        """Opens a file."""
        with Folder.open(self._path) as folder:
            return BufferedReader(folder.open_file(name, os.O_RDONLY))

    def take(self, folder: Folder, name: str, part: str) -> object:
        """Renames a file of the same folder, once its content is on the disk."""
        with folder.open_file(name, os.O_RDONLY) as file:
            files.sync(file.fileno())
            if not files.CAN_RENAME_OPEN:
                file.close()
            folder.replace(name, part)
            folder.sync()
        return folder.states()[part]

    def remove(self, name: str) -> None:
        """Removes a file."""
        with Folder.open(self._path) as folder:
            folder.remove(name)


class RemoteShelf:
    """A folder at a URL, such as s3://bucket/captions. Needs the extra `fsspec`."""

    def __init__(self, url: str) -> None:
        self.name = url.rstrip("/")
        self._fs, self._root = self._done(lambda: remote_folder(self.name, "writing there"))

    def states(self) -> Mapping[str, object]:
        """Returns the sizes of the files, none when there is no such folder."""
        found: list[dict[str, Any]] = self._done(self._list)
        return {
            str(entry["name"]).rpartition("/")[2]: entry.get("size")
            for entry in found
            if entry.get("type") == "file"
        }

    def open(self, name: str) -> IO[bytes]:
        """Opens a file."""
        path = f"{self._root}/{name}"
        file: IO[bytes] = self._done(lambda: self._fs.open(path, "rb", block_size=BLOCK_BYTES))
        return file

    def take(self, folder: Folder, name: str, part: str) -> object:
        """Uploads a file, then removes it here."""
        target = f"{self._root}/{part}"
        path = folder.path / name
        self._done(lambda: self._fs.put_file(str(path), target))
        size, found = os.stat(path).st_size, self._done(lambda: self._fs.info(target)).get("size")
        if found != size:
            raise ConfigError(
                f"{part!r} has {size} bytes, and {found} of them arrived at {self.name!r}; remove "
                "it there, then --resume uploads it again"
            )
        folder.remove(name)
        return found

    def remove(self, name: str) -> None:
        """Removes a file."""
        self._done(lambda: self._fs.rm_file(f"{self._root}/{name}"))

    def _list(self) -> list[dict[str, Any]]:
        self._fs.invalidate_cache()
        try:
            found: list[dict[str, Any]] = self._fs.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return found

    def _done(self, call: Callable[[], Value]) -> Value:
        """Calls fsspec, whose packages raise errors of their own for a network or an account."""
        try:
            return call()
        except ConfigError:
            raise
        except Exception as error:
            words = str(error) or type(error).__name__
            raise ConfigError(
                f"the output {self.name!r} cannot be used: {words[:300]}; finished items that are "
                "not there yet are kept on this machine, and --resume uploads them"
            ) from error
