"""Finds groups of near-duplicates: items that a chain of pairs above a threshold connects.

Pairs are found by products of blocks, each with itself and all that follow; of the items a few
numbers are held, of the vectors two blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mmdeploy_llm.errors import ConfigError

from .block import Block, unit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .block import Floats, Numbers

OUTER_BYTES = 128 * 2**20  # of vectors that each pass over the file is compared with
TILE = 2048  # rows and columns of a product
ROUNDING = 1e-6  # what float32 loses: vectors that are equal are above a threshold of 1

Progress = Callable[[int], object]  # told how many more items have been compared with all others


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """The groups of all items of a file, by their numbers.

    first: of each item the first one of its group, itself where it is alone. near, similarity: the
    item before or after it that is most like it, of those above the threshold; -1 and 0 without.
    is_there: whether it has a vector that can be compared.
    """

    first: Numbers
    near: Numbers
    similarity: Floats
    is_there: NDArray[np.bool_]

    @property
    def num_duplicates(self) -> int:
        """Items that are like an earlier one of their group."""
        return int((self.first != np.arange(len(self.first))).sum())

    @property
    def num_groups(self) -> int:
        """Groups of two items or more."""
        is_later = self.first != np.arange(len(self.first))
        return len(np.unique(self.first[is_later]))


def grouped(
    blocks: Callable[[], Iterable[Block]],
    num_items: int,
    threshold: float,
    *,
    outer_bytes: int = OUTER_BYTES,
    progress: Progress = bool,
) -> Groups:
    """Returns the groups of items whose cosine is at least `threshold`.

    blocks: reads the file from its begin; called once for each `outer_bytes` of it. Raises
    ConfigError for a threshold out of range, and for items with several vectors.
    """
    if not 0 < threshold <= 1:
        raise ConfigError(
            f"threshold must be a cosine above 0 and at most 1, such as 0.95, got {threshold:g}"
        )
    found = _Pairs(num_items, threshold - ROUNDING)
    begin = 0
    while (outer := _from(blocks(), begin, outer_bytes)) is not None:
        begin = int(outer.numbers[-1]) + 1
        found.is_there[outer.numbers] = True
        found.compare(outer, outer)
        for inner in _after(blocks(), begin):
            found.compare(outer, inner)
        progress(len(outer))
    return found.groups()


def _from(blocks: Iterable[Block], begin: int, num_bytes: int) -> Block | None:
    """Returns the items from number `begin` on, as many as there is room for, normalised."""
    numbers: list[Numbers] = []
    rows: list[Floats] = []
    room = num_bytes
    for block in _after(blocks, begin):
        numbers.append(block.numbers)
        rows.append(block.rows)
        room -= block.rows.nbytes
        if room <= 0:
            break
    if not numbers:
        return None
    return Block(numbers=np.concatenate(numbers), rows=np.concatenate(rows))


def _after(blocks: Iterable[Block], begin: int) -> Iterator[Block]:
    """Yields normalised blocks with the items from number `begin` on."""
    for block in blocks:
        if block.lengths is not None:
            raise ConfigError(
                "near-duplicates are found by one vector of each item, and these items have one "
                "for each token; embed them with a model of single vectors"
            )
        if len(block) and block.numbers[-1] >= begin:
            own = block.chosen(block.numbers >= begin)
            yield unit(own)


class _Pairs:
    """The pairs that are found so far, and what they connect. Filled tile by tile."""

    def __init__(self, num_items: int, bar: float) -> None:
        self._bar = bar
        self._parent = np.arange(num_items)
        self._near = np.full(num_items, -1)
        self._similarity = np.zeros(num_items, "f4")
        self.is_there = np.zeros(num_items, "?")

    def compare(self, first: Block, second: Block) -> None:
        """Compares all items of two blocks, those of one block each pair once."""
        for at in range(0, len(first), TILE):
            for to in range(0, len(second), TILE):
                left, right = slice(at, at + TILE), slice(to, to + TILE)
                if first is second and to < at:
                    continue
                products = first.rows[left] @ second.rows[right].T
                if first is second and to == at:
                    products[np.tril_indices(len(products))] = -2
                self._add(products, first.numbers[left], second.numbers[right])

    def groups(self) -> Groups:
        """Returns the groups."""
        everyone = np.arange(len(self._parent))
        return Groups(
            first=self._roots(everyone),
            near=self._near,
            similarity=self._similarity,
            is_there=self.is_there,
        )

    def _add(self, products: Floats, rows: Numbers, columns: Numbers) -> None:
        is_near = products >= self._bar
        if not is_near.any():
            return
        self._note(products, rows, columns)
        self._note(products.T, columns, rows)
        left, right = self._roots(rows), self._roots(columns)
        # Where most pairs are near, all but a few are connected after the first round.
        while True:
            is_near &= left[:, None] != right[None, :]
            some = np.flatnonzero(is_near.any(axis=1))
            if not len(some):
                return
            for one, other in zip(rows[some], columns[is_near[some].argmax(axis=1)], strict=True):
                self._connect(int(one), int(other))
            left, right = self._roots(rows), self._roots(columns)

    def _note(self, products: Floats, rows: Numbers, columns: Numbers) -> None:
        """Notes the most similar ones of `rows`."""
        best = products.argmax(axis=1)
        score = products[np.arange(len(rows)), best]
        known = self._similarity[rows]
        is_better = (score >= self._bar) & (score > known)
        self._near[rows[is_better]] = columns[best[is_better]]
        self._similarity[rows[is_better]] = score[is_better]

    def _connect(self, one: int, other: int) -> None:
        first, second = self._root(one), self._root(other)
        # The smaller number is the root: the first item of a group is the one that is kept.
        self._parent[max(first, second)] = min(first, second)

    def _root(self, item: int) -> int:
        while (parent := int(self._parent[item])) != item:
            self._parent[item] = self._parent[parent]
            item = parent
        return item

    def _roots(self, items: Numbers) -> Numbers:
        found: Numbers = self._parent[items]
        while True:
            further = self._parent[found]
            if (further == found).all():
                return found
            found = further
