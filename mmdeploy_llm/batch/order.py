"""The order in which the files of a folder are read: it mixes small and large ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

FEWEST = 64  # fewer files are read as they are listed
GOLDEN = (5**0.5 - 1) / 2


def mixed(sizes: Mapping[str, int]) -> list[str]:
    """Returns the paths in an order of which every part has files of all sizes in equal shares, so
    that the time for the first ones tells the time for the rest. The same files are always read in
    the same order; fewer than FEWEST stay as they are."""
    paths = [*sizes]
    if len(paths) < FEWEST:
        return paths
    by_size = sorted(paths, key=sizes.__getitem__)
    # Multiples of the golden ratio modulo 1 fill the interval evenly, however many are taken.
    ranks = sorted(range(len(paths)), key=lambda number: number * GOLDEN % 1)
    for rank, number in enumerate(ranks):
        paths[number] = by_size[rank]
    return paths


def sizes_of(paths: Iterable[str]) -> dict[str, int]:
    """Returns the bytes of every file, 0 of one that cannot be found."""
    return {path: _size(path) for path in paths}


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except (OSError, ValueError):  # its record will say what is wrong with it
        return 0
