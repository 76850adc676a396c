"""The nearest vectors are those that numpy finds in float64, whatever the blocks."""

from collections.abc import Iterator

import numpy as np
import pytest

from mmdeploy_llm.data.vectors.block import Block, normalized
from mmdeploy_llm.data.vectors.nearest import nearest
from mmdeploy_llm.errors import ConfigError


def random(rows: int, size: int = 16, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, size)).astype("f4")


def blocks(rows: np.ndarray, step: int) -> Iterator[Block]:
    for begin in range(0, len(rows), step):
        part = rows[begin : begin + step]
        yield Block(numbers=np.arange(begin, begin + len(part)), rows=part)


def oracle(rows: np.ndarray, query: np.ndarray, is_cosine: bool = True) -> np.ndarray:
    wide, own = rows.astype("f8"), query.astype("f8")
    if is_cosine:
        wide /= np.linalg.norm(wide, axis=1, keepdims=True)
        own = normalized(query[None])[0].astype("f8")
    return (wide * own).sum(axis=1)


@pytest.mark.full
@pytest.mark.one_is_quick
@pytest.mark.parametrize("step", [1, 7, 100, 5000])
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
def test_the_nearest_are_those_of_the_whole_matrix(step: int, similarity: str) -> None:
    rows, queries = random(1000), random(3, seed=1)
    found = nearest(blocks(rows, step), queries, 10, similarity=similarity)
    for query, hits in zip(queries, found, strict=True):
        scores = oracle(rows, query, similarity == "cosine")
        expected = np.lexsort((np.arange(1000), -scores))[:10]
        assert [hit.number for hit in hits] == expected.tolist()
        np.testing.assert_allclose([hit.score for hit in hits], scores[expected], rtol=1e-6)


@pytest.mark.parametrize("step", [1, 3, 64, 1000])
def test_equal_scores_are_in_the_order_of_the_file(step: int) -> None:
    rows = np.tile(random(5, 333), (40, 1))
    ((*hits,),) = nearest(blocks(rows, step), [rows[2]], 50)
    assert [hit.number for hit in hits[:40]] == list(range(2, 200, 5))
    assert len({hit.score for hit in hits[:40]}) == 1


def test_there_are_no_more_hits_than_items() -> None:
    assert len(nearest(blocks(random(3), 2), random(1), 10)[0]) == 3
    assert nearest([], random(2), 10) == [[], []]


def test_an_item_does_not_find_itself() -> None:
    rows = random(10)
    ((first, *_),) = nearest(blocks(rows, 4), [rows[3]], 5, excluded=[3])
    assert first.number != 3


def test_a_vector_of_zeros_is_like_nothing() -> None:
    rows = np.zeros((2, 4), "f4")
    assert [hit.score for hit in nearest(blocks(rows, 1), random(1, 4), 2)[0]] == [0, 0]


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e22, 3e38])
def test_the_length_of_vectors_does_not_count(scale: float) -> None:
    rows = random(20)
    rows /= np.abs(rows).max()
    query = random(1, seed=3)[0]
    plain = nearest(blocks(rows, 8), [query], 20)
    found = nearest(blocks(rows * np.float32(scale), 8), [query], 20)
    assert [hit.number for hit in found[0]] == [hit.number for hit in plain[0]]


@pytest.mark.parametrize("step", [1, 5, 100])
def test_several_vectors_are_compared_by_their_best_pairs(step: int) -> None:
    generator = np.random.default_rng(0)
    items = [random(int(generator.integers(1, 9)), seed=number) for number in range(60)]
    query = random(4, seed=99)
    parts = []
    for begin in range(0, len(items), step):
        own = items[begin : begin + step]
        numbers = np.arange(begin, begin + len(own))
        lengths = np.array([len(item) for item in own])
        parts.append(Block(numbers=numbers, rows=np.concatenate(own), lengths=lengths))
    (hits,) = nearest(parts, [query], 7)
    scores = [(normalized(query) @ normalized(item).T).max(axis=1).sum() for item in items]
    assert [hit.number for hit in hits] == np.argsort(-np.array(scores))[:7].tolist()
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1][:7], rtol=1e-5)


def test_what_cannot_be_compared_is_told() -> None:
    with pytest.raises(ConfigError, match="has 4 numbers, and those of the file have 16"):
        nearest(blocks(random(3), 2), random(1, 4), 1)
    with pytest.raises(ConfigError, match="top_k must be at least 1, got 0"):
        nearest([], random(1), 0)
    with pytest.raises(ConfigError, match="must be cosine or dot, got 'l2'"):
        nearest([], random(1), 1, similarity="l2")
    with pytest.raises(ConfigError, match="not finite"):
        nearest([], [np.array([np.nan, 1], "f4")], 1)


@pytest.mark.parametrize("size", [1, 5, 40])
def test_pieces_are_the_block(size: int) -> None:
    lengths = np.array([3, 1, 4, 1, 5])
    whole = Block(numbers=np.array([0, 2, 3, 7, 9]), rows=random(14, 2), lengths=lengths)
    for block in (whole, Block(numbers=np.arange(14), rows=whole.rows)):
        parts = list(block.pieces(size * 8))
        np.testing.assert_array_equal(np.concatenate([part.rows for part in parts]), block.rows)
        numbers = np.concatenate([part.numbers for part in parts])
        np.testing.assert_array_equal(numbers, block.numbers)
        assert all(len(part.rows) <= max(size, 5) for part in parts)


def test_products_that_float32_does_not_hold_are_ranked() -> None:
    rows = random(30) * np.float32(1e30)
    (hits,) = nearest(
        blocks(rows, 7), [random(1, seed=2)[0] * np.float32(1e30)], 5, similarity="dot"
    )
    scores = oracle(rows, random(1, seed=2)[0] * np.float32(1e30), is_cosine=False)
    assert [hit.number for hit in hits] == np.argsort(-scores)[:5].tolist()
