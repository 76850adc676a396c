"""The choices of how Markdown is written, for all doors: the command and Python."""

from __future__ import annotations

from mmdeploy_llm.errors import ConfigError

TABLES = ("html", "markdown")
RUNNING = ("mark", "keep")


def check_tables(tables: str | None, running: str, *, is_written: bool) -> None:
    """Raises ConfigError for unknown choices, and for one without an effect. is_written: whether
    Markdown is."""
    for name, value, known in (("tables", tables, TABLES), ("running", running, RUNNING)):
        if value is not None and value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value[:40]!r}")
    if running != RUNNING[0] and not is_written:
        raise ConfigError("running needs markdown, a folder for it")
