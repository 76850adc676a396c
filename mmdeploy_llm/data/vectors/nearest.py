"""Finds the nearest vectors, exactly: blocks of a file are multiplied with the queries, and what
may be among the nearest is computed again in float64.

A score is the cosine of the angle, or with "dot" the product. Of items with several vectors it is
MaxSim: for each vector of the query the largest of the item's, summed up. Equal scores are in the
order of the file, whatever the size of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from mmdeploy_llm.errors import ConfigError

from .block import Block, normalized

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .block import Floats

Similarity = Literal["cosine", "dot"]
# More than what float32 loses in a product of so many numbers, relative to the vectors' lengths.
ROUNDING = 4e-7
SHORTEST, LONGEST = 1e-15, 1e15  # lengths whose squares float32 holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """An item that is near. number: of the item in the file."""

    number: int
    score: float


def nearest(
    blocks: Iterable[Block],
    queries: Sequence[Floats],
    top_k: int,
    *,
    similarity: str = "cosine",
    excluded: Sequence[int | None] = (),
) -> list[list[Hit]]:
    """Returns the nearest items of each query, the best first.

    queries: [size] or [tokens, size] each. excluded: for each query the number of an item that it
    is not to find, such as itself. Raises ConfigError for a query whose size is not the file's.
    """
    check_similarity(similarity)
    if top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}")
    is_cosine = similarity == "cosine"
    rows = [np.atleast_2d(np.asarray(query, "f4")) for query in queries]
    for own in rows:
        if not np.isfinite(own).all():
            raise ConfigError("the vector of the query is not finite")
    rows = [normalized(own) for own in rows] if is_cosine else rows
    tops = [_Top(top_k, is_cosine=is_cosine) for _ in rows]
    without = [*excluded, *[None] * (len(rows) - len(excluded))]
    for block in blocks:
        for query, top, number in zip(rows, tops, without, strict=True):
            if query.shape[1] != block.rows.shape[1]:
                raise ConfigError(
                    f"the query's vector has {query.shape[1]} numbers, and those of the file have "
                    f"{block.rows.shape[1]}: they are of another model, or of other dimensions"
                )
            top.add(block, query, number)
    return [top.hits() for top in tops]


def check_similarity(similarity: str) -> None:
    """Raises ConfigError for an unknown one."""
    if similarity not in get_args(Similarity):
        known = " or ".join(get_args(Similarity))
        raise ConfigError(f"similarity must be {known}, got {similarity[:40]!r}")


class _Top:
    """The nearest items of one query so far. Filled block by block, in the order of the file."""

    def __init__(self, most: int, *, is_cosine: bool) -> None:
        self._most, self._is_cosine = most, is_cosine
        self._scores = np.zeros(0)
        self._numbers = np.zeros(0, "i8")

    def add(self, block: Block, query: Floats, excluded: int | None) -> None:
        """Takes those of a block that are nearer than what is known."""
        if not len(block):
            return
        is_asked = np.ones(len(block), "?") if excluded is None else block.numbers != excluded
        may = np.flatnonzero(self._may(block, query, is_asked) & is_asked)
        self._take(self._exact(block, may, query), block.numbers[may])

    def hits(self) -> list[Hit]:
        """Returns the nearest, the best first."""
        pairs = zip(self._numbers.tolist(), self._scores.tolist(), strict=True)
        return [Hit(number=number, score=score) for number, score in pairs]

    def _may(
        self, block: Block, query: Floats, is_asked: NDArray[np.bool_]
    ) -> NDArray[np.bool_] | bool:
        """Returns which items may be among the nearest, by their products in float32."""
        lengths = np.sqrt(block.squares)
        if not ((lengths == 0) | ((lengths > SHORTEST) & (lengths < LONGEST))).all():
            return True  # float64 holds what float32 does not
        products = query @ block.rows.T
        if self._is_cosine:
            products /= np.where(lengths == 0, 1, lengths)
        rough = _summed(products, block)
        longest = 1.0 if self._is_cosine else float(lengths.max())
        size = float(np.linalg.norm(query)) * longest * float(np.sqrt(query.size))
        found: NDArray[np.bool_] = rough >= self._bar(rough[is_asked]) - 4 * ROUNDING * size
        return found

    def _bar(self, rough: NDArray[np.floating]) -> float:
        """Returns a score that the last one of the nearest has at least, within rounding."""
        bar = float(self._scores[-1]) if len(self._scores) == self._most else -np.inf
        if len(rough) > self._most:
            bar = max(bar, float(np.partition(rough, -self._most)[-self._most]))
        return bar

    def _exact(self, block: Block, may: NDArray[np.int64], query: Floats) -> NDArray[np.float64]:
        """Returns the scores of some items, row by row: they do not depend on the block."""
        wide = query.astype("f8")
        if block.lengths is None:
            return np.asarray(sum(self._products(block.rows[may], own) for own in wide))
        starts = block.starts
        found = np.zeros(len(may))
        for at, item in enumerate(may):
            rows = block.rows[starts[item] : starts[item] + block.lengths[item]]
            found[at] = sum(self._products(rows, own).max() for own in wide)
        return found

    def _products(self, rows: Floats, query: NDArray[np.float64]) -> NDArray[np.float64]:
        wide = rows.astype("f8")
        found: NDArray[np.float64] = (wide * query).sum(axis=1)
        if not self._is_cosine:
            return found
        lengths = np.sqrt((wide * wide).sum(axis=1))
        return found / np.where(lengths == 0, 1, lengths)

    def _take(self, scores: NDArray[np.float64], numbers: NDArray[np.int64]) -> None:
        scores = np.concatenate([self._scores, scores])
        numbers = np.concatenate([self._numbers, numbers])
        order = np.lexsort((numbers, -scores))[: self._most]
        self._scores, self._numbers = scores[order], numbers[order]


def _summed(products: NDArray[np.floating], block: Block) -> NDArray[np.floating]:
    """Returns the score of each item from the products [tokens of the query, rows]."""
    if block.lengths is not None:
        products = np.maximum.reduceat(products, block.starts, axis=1)
    found: NDArray[np.floating] = products.sum(axis=0)
    return found
