"""The choices of how Markdown is written, for all doors: the command and Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdeploy_llm.errors import ConfigError

CHOICES = {"tables": ("html", "markdown"), "running": ("mark", "keep")}


def check_tables(given: Mapping[str, Any], *, is_written: bool) -> None:
    """Raises ConfigError for unknown choices among what is given, and for one without an effect.
    is_written: whether Markdown is."""
    for name, known in CHOICES.items():
        value = given.get(name)
        if value is not None and value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value[:40]!r}")
    if given.get("running") is not None and not is_written:
        raise ConfigError("running needs markdown, a folder for it")
