"""Reads a file of a model part by part, nothing of it beyond its end."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mmdeploy_llm.errors import CheckpointError


class StoredBytes:
    """The parts of a file, one after the other. wrong: returns the error for a file, of what is
    wrong with it; it is raised where the file ends early."""

    def __init__(
        self, path: Path, file: BinaryIO, wrong: Callable[[Path, str], CheckpointError]
    ) -> None:
        self.path = path
        self._file, self._size = file, os.fstat(file.fileno()).st_size
        self._wrong = wrong

    @property
    def left(self) -> int:
        """Bytes up to the end of the file."""
        return self._size - self._file.tell()

    def error(self, what: str) -> CheckpointError:
        """Returns the error for a file that is not as it must be."""
        return self._wrong(self.path, what)

    def bytes(self, size: int) -> bytes:
        """Returns the next bytes."""
        if size > self.left:
            raise self.error("ends early: it is truncated")
        return self._file.read(size)

    def unpacked(self, form: str) -> int:
        """Returns the next number, in a format of the module struct."""
        found: int = struct.unpack(form, self.bytes(struct.calcsize(form)))[0]
        return found

    def skip(self, num_bytes: int, what: str) -> int:
        """Passes over some bytes, which are `what`. Returns where they begin."""
        begin = self._file.tell()
        if num_bytes > self.left:
            raise self.error(f"ends within its {what}: it is truncated")
        self._file.seek(num_bytes, os.SEEK_CUR)
        return begin

    def value_at(self, offset: int, form: str) -> float:
        """Returns the number that was just passed over."""
        self._file.seek(offset)
        return self.unpacked(form)
