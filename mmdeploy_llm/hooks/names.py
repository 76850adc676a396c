"""Names and error texts in the form in which the plugin code compares and shows them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_ERROR_LENGTH = 2000  # characters; an exception can carry a whole file

_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-fA-F]{4,}")


def normalise(name: str) -> str:
    """Returns the form in which names are compared: "Ernie_45_VL" becomes "ernie-45-vl"."""
    return name.strip().replace("_", "-").lower()


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "; did you mean 'x'?" when `known` has a name close to `name`, else ""."""
    by_form = {normalise(candidate): candidate for candidate in known}
    near = difflib.get_close_matches(normalise(name), by_form, n=1)
    return f"; did you mean {by_form[near[0]]!r}?" if near else ""


def listing(names: Iterable[str]) -> str:
    """Returns the names sorted and separated by commas, "none" when there are none."""
    return ", ".join(sorted(set(names))) or "none"


def error_text(error: BaseException) -> str:
    """Returns class and message of `error` without memory addresses, which differ from run to
    run."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be shown)"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return _ADDRESS.sub("", text)[:MAX_ERROR_LENGTH]
