"""The options of one sound."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from mmdeploy_llm.errors import MediaError

RATES = range(100, 1_000_001)  # samples per second


@dataclass(frozen=True, slots=True, kw_only=True)
class SoundOptions:
    """Resolved options.

    sampling_rate: of an array that is given without one, samples per second.
    start, end: the seconds from and to which the sound is used; end None, or beyond the last
        sample: up to it.
    """

    sampling_rate: int | None = None
    start: float = 0.0
    end: float | None = None


NAMES = ("sampling_rate", "start", "end")


def sound_options(given: Mapping[str, Any]) -> SoundOptions:
    """Resolves the options of one sound. Raises MediaError for unknown names and wrong values."""
    for name in given:
        if name not in NAMES:
            near = difflib.get_close_matches(str(name), NAMES, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(NAMES)}"
            raise MediaError(f"a sound has no option {name!r}; {hint}")
    rate, start, end = (given.get(name) for name in NAMES)
    if rate is not None:
        rate = checked_rate(rate)
    start = 0.0 if start is None else _seconds(start, "start")
    end = None if end is None else _seconds(end, "end")
    if end is not None and end <= start:
        raise MediaError(f"the sound's end, {end:g} s, must be after its start, {start:g} s")
    return SoundOptions(sampling_rate=rate, start=start, end=end)


def checked_rate(value: Any) -> int:
    """Returns a sampling rate as an int. Raises MediaError for anything but a whole number of
    samples per second within RATES."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value not in RATES:
        raise MediaError(
            f"sampling_rate must be a whole number of samples per second, {RATES[0]} to "
            f"{RATES[-1]}, got {value!r:.60}"
        )
    return int(value)


def _seconds(value: Any, name: str) -> float:
    is_number = isinstance(value, (Real, Integral)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value < 0:
        raise MediaError(f"the sound's {name} must be seconds, 0 or more, got {value!r:.60}")
    return float(value)
