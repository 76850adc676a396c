"""Divides a sound into windows that a model hears at once, each of which begins before the last one
ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mmdeploy_llm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Samples first .. end of a sound."""

    first: int
    end: int


def windows_of(num_samples: int, size: int, overlap: int) -> Iterator[Window]:
    """Yields the windows of a sound, in order: all of `size` samples but the last.

    Each begins `overlap` samples before the end of the one before, but none lies in the one before.
    Raises ConfigError for an overlap of half a window or more.
    """
    if not 0 <= 2 * overlap < size:
        raise ConfigError("the overlap of windows must be 0 or more, and less than half a window")
    first = 0
    while True:
        end = min(first + size, num_samples)
        yield Window(first=first, end=end)
        if end == num_samples:
            return
        first = end - overlap
