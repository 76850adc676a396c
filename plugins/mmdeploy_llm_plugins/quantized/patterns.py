"""Matches names with patterns from a checkpoint, which may be made to take for ever."""

from __future__ import annotations

import re
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

from mmdeploy_llm.errors import CheckpointError

MAX_PATTERN = 500  # characters
MAX_REPEATS = 3  # of unbounded repeats: the time grows with the length of a name to this power
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT)
LONG = 16  # a repeat of more times counts as unbounded


def matches(pattern: str, name: str) -> bool:
    """Whether a name begins with a match of the pattern. Raises CheckpointError for a pattern that
    is malformed or could take for ever."""
    try:
        parsed = _parser.parse(pattern) if len(pattern) <= MAX_PATTERN else None
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            "quantization_config in config.json has the malformed pattern "
            f"{pattern[:80]!r}: {error}"
        ) from None
    if parsed is None or _num_repeats(parsed) > MAX_REPEATS:
        raise CheckpointError(
            f"quantization_config in config.json has the pattern {pattern[:80]!r}, which could "
            f"take for ever; patterns have up to {MAX_PATTERN} characters and {MAX_REPEATS} "
            "repeats, none within another"
        )
    return re.match(pattern, name) is not None


def _num_repeats(parsed: Any) -> int:
    """Counts unbounded repeats; one within another counts as too many."""
    total = 0
    for operation, argument in parsed:
        inner = sum(_num_repeats(part) for part in _parts(argument))
        is_long = operation in REPEATS and int(argument[1]) > LONG
        total += (MAX_REPEATS + 1 if inner else 1) if is_long else inner
    return total


def _parts(argument: Any) -> list[Any]:
    """Returns the patterns within the argument of an operation."""
    if isinstance(argument, _parser.SubPattern):
        return [argument]
    if isinstance(argument, list | tuple):
        return [part for each in argument for part in _parts(each)]
    return []
