"""Writes for people: a value that came from outside in the message of an error, a duration."""

from __future__ import annotations

import errno
import re
from collections.abc import Sequence

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


def seconds(value: float | None) -> str:
    """Formats a duration: "340 ms", "2.1 s", "3 min 05 s"; "not reached" for None."""
    if value is None:
        return "not reached"
    if value < 1:
        return f"{value * 1000:.0f} ms"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest:02d} s"


def duration(value: float) -> str:
    """Formats seconds that are estimated: "0.4 s", "40 s", "3 min 05 s", "2 h 10 min",
    "3 days 4 h"."""
    if 0 < value < 0.95:  # what is left takes more than nothing
        return f"{max(value, 0.1):.1f} s"
    whole = round(value)
    for size, name, inner, inner_name in (
        (86400, "days" if whole >= 2 * 86400 else "day", 3600, "h"),
        (3600, "h", 60, "min"),
        (60, "min", 1, "s"),
    ):
        if whole >= size:
            return f"{whole // size} {name} {whole % size // inner:02d} {inner_name}"
    return f"{whole} s"


def system_words(error: OSError) -> str:
    """Returns what the system refused, and what to do about it."""
    if error.errno is None or error.strerror is None:
        return str(error)
    names = [repr(name) for name in (error.filename, error.filename2) if name is not None]
    words = ": ".join((*filter(None, (" -> ".join(names),)), error.strerror))
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        return f"{words}; make room there, or name an output on another disk"
    if names and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{words}; change the rights of the file or of its folder, or name another place"
    return words


def listed(names: Sequence[str], word: str = "or") -> str:
    """Returns names in words: "image, video or audio"."""
    *others, last = names or ("",)
    return f"{', '.join(others)} {word} {last}" if others else last
