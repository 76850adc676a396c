"""Reads the chat template that a caller gives."""

from __future__ import annotations

from pathlib import Path

from mmdeploy_llm.errors import ConfigError

MAX_SHOWN = 500  # characters of a path in a message


def load_template(text: str) -> str:
    """Returns the user's template: the content of a file of that name, else the text itself.

    Raises ConfigError for a text that has neither braces nor a line break and names no file: it
    looks like a file path, as in FastDeploy.
    """
    is_template = any(mark in text for mark in "{}\n")
    try:
        if not is_template or Path(text).is_file():
            return Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if not is_template:
            raise ConfigError(
                f"the chat template {text[:MAX_SHOWN]!r} looks like a file path, but there is no "
                "such file that can be read; give a Jinja template or an existing file"
            ) from error
    return text
