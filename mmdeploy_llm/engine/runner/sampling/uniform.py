"""Computes one random number for each (seed, position), by a hash and not from a stream, so that
neither the batch nor a preemption can change it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Returns numbers in [0, 1), multiples of 2**-53, one for each pair; both arguments [N].

    splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): the
    seed is hashed once, so that neighbouring seeds start far apart; positions count from there.
    """
    states = first_states(seeds) + (positions + np.uint64(1)) * GOLDEN
    return (_mix(states) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def first_states(seeds: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns the states from which positions count, [N], one for each seed [N]."""
    return _mix(seeds + GOLDEN)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Applies splitmix64's finaliser, a bijection of 64 bits; products wrap around."""
    values = (values ^ (values >> np.uint64(30))) * MULTIPLIERS[0]
    values = (values ^ (values >> np.uint64(27))) * MULTIPLIERS[1]
    return values ^ (values >> np.uint64(31))
