"""Lone surrogates in texts of a batch: half a character of UTF-16, which JSON can escape but UTF-8
cannot hold. Python's names for files that are not UTF-8 contain them: U+DCxx stands for byte xx.

Most readers of JSON refuse or replace them. So a record has U+FFFD in their place, and the exact
text as ASCII in its field `exact`.
"""

from __future__ import annotations

import re
from typing import Any

_LONE = re.compile(r"[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """Replaces lone surrogates by U+FFFD."""
    return text if text.isascii() else _LONE.sub("\ufffd", text)


def replaced(value: Any) -> Any:
    """Copies nested dicts and lists; replaces lone surrogates in every text, names included."""
    if isinstance(value, str):
        return without_surrogates(value)
    if isinstance(value, dict):
        return {replaced(name): replaced(item) for name, item in value.items()}
    return [replaced(item) for item in value] if isinstance(value, (list, tuple)) else value


def escaped(text: str) -> str:
    r"""Returns the text in ASCII with Python's escapes: \udcff for U+DCFF, \xe9 for U+00E9."""
    return text.encode("unicode_escape").decode("ascii")


def unescaped(text: Any) -> str:
    """Returns what `escaped` was given. Raises ValueError for anything else."""
    if not isinstance(text, str):
        raise ValueError("its exact texts are not texts")
    return text.encode("ascii").decode("unicode_escape")
