"""Recognises outputs of batches: nothing else is overwritten, continued or cut off."""

from __future__ import annotations

import os
from io import BufferedReader
from pathlib import Path

from mmdeploy_llm.data.records.files import open_regular
from mmdeploy_llm.data.records.growing import GrowingPart
from mmdeploy_llm.data.records.record import Record
from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable import files

BEGIN = b'{"id": '  # of a line
MAX_LINE = 2**28
REST_BYTES = 2**16  # by which a torn record is recognised


def is_torn(rest: bytes) -> bool:
    """Whether bytes at the end of a file of records are the begin of a record, as a killed run
    leaves it; zeros among them, as a machine that lost its power does."""
    own = rest.strip(b"\0")
    return own.startswith(BEGIN) or BEGIN.startswith(own)


def companions(path: Path) -> tuple[Path, ...]:
    """Returns the files that a batch keeps beside a file of lines."""
    names = ("config.json", "state.json", "config.json.partial", "state.json.partial", "partial")
    return tuple(path.with_name(f"{path.name}.{name}") for name in names)


def check_overwritten(path: Path) -> None:
    """Raises ConfigError for a file that is no output of a batch: its first line is no record, and
    it is not empty, and no files of a batch are beside it."""
    try:
        with BufferedReader(open_regular(path, os.O_RDONLY)) as file:
            line = file.readline(MAX_LINE)
    except FileNotFoundError:
        return
    if not line or any(map(os.path.lexists, companions(path)[:2])):
        return
    try:
        is_ours = not line.endswith(b"\n") and is_torn(line)
        is_ours = is_ours or bool(Record.from_json(line))
    except (ValueError, RecursionError):
        is_ours = False
    if not is_ours:
        raise ConfigError(foreign(path))


def save_foreign(file: GrowingPart, end: int) -> None:
    """Copies what follows the last whole record to a file of its own, unless it is a torn one."""
    if not is_torn(files.read_at(file.file.fileno(), REST_BYTES, end)):
        file.set_aside(end)


def foreign(name: Path | str) -> str:
    """Returns the message for something that is no output of a batch."""
    return (
        f"{str(name)!r} exists and is no output of a batch, so it stays as it is; move it away or "
        "name another --output"
    )
