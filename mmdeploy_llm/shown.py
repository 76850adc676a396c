"""Shows a value that came from outside in the message of an error."""

from __future__ import annotations

MAX_SHOWN = 200  # characters


def shown(value: object) -> str:
    """Returns a short repr. Python refuses to write integers of more than 4,300 digits."""
    try:
        text = repr(value)
    except Exception:
        text = f"a value of type {type(value).__name__} that cannot be shown"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
