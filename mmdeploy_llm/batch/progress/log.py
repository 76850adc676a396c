"""EventLog: a file that gains one JSON object for each event of a run; docs/outcomes.md has its
schema. Lines are appended: a run that is resumed goes on in the same file."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mmdeploy_llm.errors import ConfigError
from mmdeploy_llm.system.portable import files

logger = logging.getLogger(__name__)

MAX_LINE = 2**16  # bytes that are read of a file to see whether it is a log


class EventLog:
    """A log. Its methods may be called from any thread; a log that cannot be written any more, such
    as on a full disk, does not end the run."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises ConfigError for a file that cannot be opened, or that has something else in
        it."""
        self._path = Path(path)
        self._lock = threading.Lock()
        try:
            _check(self._path)
            # A pipe that nobody reads is an error, not a wait.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | files.NO_WAIT
            self._file: int | None = os.open(self._path, flags, 0o666)
        except OSError as error:
            raise ConfigError(
                f"the log of events {str(self._path)!r} cannot be written: {error.strerror}"
            ) from None
        files.wait_for_writes(self._file)

    def write(self, event: str, values: dict[str, Any]) -> None:
        """Appends one line."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = json.dumps({"event": event, "time": now, **values}, default=str).encode() + b"\n"
        with self._lock:
            while line and self._file is not None:
                try:
                    line = line[os.write(self._file, line) :]
                except OSError as error:
                    self._give_up(error)

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _give_up(self, error: OSError) -> None:
        assert self._file is not None
        os.close(self._file)
        self._file = None
        logger.warning(
            "the log of events %r cannot be written (%s): it ends here, the run goes on",
            str(self._path),
            error.strerror,
        )


def _check(path: Path) -> None:
    """Raises ConfigError for a file with content that is no log: events would damage it."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return
    except FileNotFoundError:
        return
    with path.open("rb") as file:
        first = file.readline(MAX_LINE)
    try:
        found = json.loads(first) if first.strip() else {"event": ""}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or "event" not in found:
        raise ConfigError(
            f"{str(path)!r} exists and is no log of events, which would be added to it; name "
            "another file with --log-json"
        )
