"""Parses JSON texts of corpora, within bounds of memory."""

from __future__ import annotations

import json
from typing import Any

MAX_MARKS = 2**21  # in one text: each of MARKS can begin a value that takes 200 bytes of memory
MARKS = ",[{"


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError for what is not JSON, is nested too
    deeply, or has too many values for its size."""
    if len(text) > MAX_MARKS and sum(map(text.count, MARKS)) > MAX_MARKS:
        raise ValueError(f"it has more than {MAX_MARKS} commas and brackets")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
