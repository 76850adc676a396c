"""Shows a value that came from outside in the message of an error."""

from __future__ import annotations

import re

MAX_SHOWN = 200  # characters
MAX_ERROR_LENGTH = 2000  # characters; an exception can carry a whole file

_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-fA-F]{4,}")


def shown(value: object) -> str:
    """Returns a short repr. Python refuses to write integers of more than 4,300 digits."""
    try:
        text = repr(value)
    except Exception:
        text = f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def error_text(error: BaseException) -> str:
    """Returns class and message of `error` without memory addresses, which differ from run to
    run."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return _ADDRESS.sub("", text)[:MAX_ERROR_LENGTH]
