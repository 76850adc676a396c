"""Names several things in a sentence."""

from __future__ import annotations

from collections.abc import Sequence


def listed(names: Sequence[str], word: str = "or") -> str:
    """Returns names in words: "image, video or audio"."""
    *others, last = names or ("",)
    return f"{', '.join(others)} {word} {last}" if others else last
