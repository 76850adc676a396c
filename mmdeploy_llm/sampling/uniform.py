"""Random numbers that depend on (seed, position) only: not on the batch, the slot or a
preemption."""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, for the token at `position` of a request's output.

    Two rounds of the splitmix64 finalizer (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014), one over the seed and one over the position.
    """
    return (_mix(_mix(seed + _GOLDEN) + (position + 1) * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
