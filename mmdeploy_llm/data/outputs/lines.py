"""Parts of JSON lines, and the journal: a file of lines that grows until it becomes a part."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from io import FileIO
from typing import IO

from mmdeploy_llm.data.records.files import Folder
from mmdeploy_llm.data.records.growing import GrowingPart
from mmdeploy_llm.data.records.media import OpenMedia
from mmdeploy_llm.data.records.record import Record

from .formats import Drops, Limits, PartFormat, PartReader, first_positions
from .recognise import save_foreign
from .scan import Entry, line_ends, parsed, whole_lines

MAX_ITEMS, MAX_BYTES = 20_000, 64 * 2**20


class LineReader:
    """Reads a part or a journal; the position of a record is the number of its line, from 0."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file, self._name = file, name
        self._offsets: list[int] | None = None

    def entries(self) -> Iterator[Entry]:
        """Yields the records; skips a torn last line."""
        self._file.seek(0)
        for number, line in enumerate(whole_lines(self._file)):
            record = parsed(line, self._name, number + 1)
            yield Entry(begin=number, end=number + 1, record=record)

    def at(self, position: int) -> Record:
        """Returns the record of a line."""
        if self._offsets is None:
            self._file.seek(0)
            ends = [0]
            for line in whole_lines(self._file):
                ends.append(ends[-1] + len(line))
            self._offsets = ends
        self._file.seek(self._offsets[position])
        return parsed(self._file.readline(), self._name, position + 1)

    def media(self, position: int) -> AbstractContextManager[None]:
        """Returns None: lines hold no media."""
        return nullcontext()

    def configurations(self) -> str | None:
        """Returns None: lines have no place for them."""
        return None

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class LineParts(PartFormat):
    """Parts that are files of lines, for an output at a URL; the base of those of which the part
    that grows is one."""

    def __init__(self, most_items: int | None) -> None:
        self.limits = Limits(items=most_items or MAX_ITEMS, num_bytes=MAX_BYTES)

    def reader(self, file: IO[bytes], name: str, *, is_open: bool) -> PartReader:
        """Opens a part or a journal."""
        return LineReader(file, name)

    def begin(self, file: GrowingPart, name: str, configurations: str | None) -> int:
        """Cuts off a torn last line; returns the number of lines."""
        ends = list(line_ends(file.file))
        save_foreign(file, ends[-1] if ends else 0)
        file.keep(ends)
        return len(file)

    def append(self, file: GrowingPart, record: Record, media: OpenMedia) -> int:
        """Adds a line."""
        file.write(record.to_json().encode() + b"\n")
        file.commit()
        return 1

    def seal(
        self,
        file: IO[bytes],
        name: str,
        new: Callable[[], IO[bytes]],
        configurations: str | None,
    ) -> bool:
        """Returns False: the journal itself is a part."""
        return False

    def copy_without(self, file: IO[bytes], drops: Drops, out: IO[bytes], *, is_open: bool) -> bool:
        """Copies the other lines."""
        dropped, is_any = first_positions(drops), False
        for number, line in enumerate(whole_lines(file)):
            if number not in dropped:
                out.write(line)
                is_any = True
        return is_any


def new_file(folder: Folder, name: str) -> FileIO:
    """Makes a file in a folder in place of what a killed run has left there, or of a link."""
    folder.remove(name)
    return folder.open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
