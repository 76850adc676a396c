"""RecordWriter: a JSONL file that grows by a line as each result comes, and can be taken up again.

new        the file must not exist
overwrite  an old one is replaced, when the first record could be written
resume     its good lines stay; those of images that are done again, and a torn last line, go
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from mmdeploy_llm.errors import ConfigError

from .records import CaptionRecord

Mode = Literal["new", "overwrite", "resume"]


def check_target(path: Path, mode: Mode) -> None:
    """Raises ConfigError when `path` cannot be written in this mode; changes nothing."""
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; name a file to write")
    if mode == "new" and path.exists():
        raise ConfigError(
            f"{str(path)!r} exists already; --resume does what is left, --overwrite starts again, "
            "--output writes elsewhere"
        )


def read_records(path: Path) -> Iterator[CaptionRecord]:
    """The records of a file, nothing when there is none. A last line without its end is torn by
    an interruption and left out. Raises ConfigError for a line that is no record."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            yield _parsed(line, path, number)


def _parsed(line: bytes, path: Path, number: int) -> CaptionRecord:
    try:
        return CaptionRecord.from_json(line)
    except ValueError as error:
        raise ConfigError(
            f"line {number} of {str(path)!r} is no caption record ({error}); name another file "
            "with --output, or --overwrite this one"
        ) from None


def paths_done(path: Path) -> frozenset[str]:
    """The images that have their caption in this file."""
    return frozenset(record.path for record in read_records(path) if record.is_ok)


class RecordWriter:
    """Writes records, each flushed at once: what was written survives the end of the process.

    todo: the images that will be written; with mode "resume" their old lines (failures) are
    dropped first, so that an image never has two lines. Used from one thread.
    """

    def __init__(self, path: Path, mode: Mode, todo: Container[str] = ()) -> None:
        check_target(path, mode)
        path.parent.mkdir(parents=True, exist_ok=True)
        if mode == "resume" and path.exists():
            _keep_others(path, todo)
        self._file = path.open(
            {"new": "x", "overwrite": "w", "resume": "a"}[mode], encoding="utf-8"
        )

    def write(self, record: CaptionRecord) -> None:
        """Appends one line."""
        self._file.write(record.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Ends writing."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _keep_others(path: Path, todo: Container[str]) -> None:
    """Replaces the file, in one move, by its records of images that are not in `todo`."""
    copy = path.with_name(path.name + ".partial")
    with copy.open("w", encoding="utf-8") as file:
        file.writelines(
            record.to_json() + "\n" for record in read_records(path) if record.path not in todo
        )
    os.replace(copy, path)
