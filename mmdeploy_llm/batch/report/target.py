"""Checks the file that a report is written to: what is there and is no report stays."""

from __future__ import annotations

import os
from pathlib import Path

from mmdeploy_llm.data.records.files import open_regular
from mmdeploy_llm.errors import ConfigError

HEAD_BYTES = 4096  # in which a page says what wrote it
MARK = b'<meta name="generator" content="mmdeploy-llm'


def check_page(path: Path) -> None:
    """Raises ConfigError when a report cannot be written to `path`: a folder, a link, a FIFO or a
    device has this name, or a file that is neither a report nor empty."""
    if path.is_dir():
        raise ConfigError(f"{str(path)!r} is a folder; name an HTML file for the report")
    try:
        with open_regular(path, os.O_RDONLY) as file:
            head = file.read(HEAD_BYTES)
    except FileNotFoundError:
        return
    if head and MARK not in head:
        raise ConfigError(
            f"{str(path)!r} exists and is no report of a batch, so it stays; move it away or name "
            "another file for the report"
        )
