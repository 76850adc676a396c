"""Groups of near-duplicates are those that comparing every pair gives."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from mmdeploy_llm.data.vectors import groups
from mmdeploy_llm.data.vectors.block import Block, normalized
from mmdeploy_llm.data.vectors.groups import grouped
from mmdeploy_llm.errors import ConfigError


def clusters(rows: int, size: int = 8, noise: float = 0.2, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    centres = generator.standard_normal((max(1, rows // 5), size))
    found = centres[generator.integers(0, len(centres), rows)]
    return (found + noise * generator.standard_normal((rows, size))).astype("f4")


def reader(rows: np.ndarray, step: int) -> Callable[[], Iterator[Block]]:
    def read() -> Iterator[Block]:
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step]
            yield Block(numbers=np.arange(begin, begin + len(part)), rows=part)

    return read


def first_by_pairs(rows: np.ndarray, threshold: float) -> list[int]:
    unit = normalized(rows)
    is_near = unit @ unit.T >= threshold - 1e-6
    first = list(range(len(rows)))
    for _ in rows:
        for own in range(len(rows)):
            first[own] = min(first[other] for other in np.flatnonzero(is_near[own]))
    return first


@pytest.mark.one_is_quick
@pytest.mark.parametrize("step", [1, 7, 50])
@pytest.mark.parametrize("outer", [1, 600, 10**6])
@pytest.mark.parametrize("tile", [3, 64])
def test_groups_are_what_pairs_connect(
    step: int, outer: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "TILE", tile)
    rows = clusters(50)
    found = grouped(reader(rows, step), 50, 0.9, outer_bytes=outer)
    expected = first_by_pairs(rows, 0.9)
    assert found.first.tolist() == expected
    assert 0 < found.num_duplicates == sum(own != first for own, first in enumerate(expected))
    assert found.num_groups == len({first for own, first in enumerate(expected) if own != first})


def test_the_most_similar_item_is_named() -> None:
    rows = clusters(50)
    found = grouped(reader(rows, 9), 50, 0.9)
    unit = normalized(rows)
    products = unit @ unit.T
    np.fill_diagonal(products, -2)
    best = products.max(axis=1)
    is_near = best >= 0.9
    np.testing.assert_allclose(found.similarity[is_near], best[is_near], rtol=1e-5)
    assert found.near[is_near].tolist() == products.argmax(axis=1)[is_near].tolist()
    assert (found.near[~is_near] == -1).all()


@pytest.mark.full
def test_equal_vectors_are_one_group_at_a_threshold_of_1() -> None:
    rows = np.tile(clusters(1, 777), (3000, 1))
    found = grouped(reader(rows, 1000), 3000, 1.0)
    assert found.num_groups == 1
    assert found.num_duplicates == 2999


def test_a_vector_of_zeros_is_like_nothing() -> None:
    found = grouped(reader(np.zeros((4, 3), "f4"), 2), 4, 0.5)
    assert found.num_duplicates == 0


def test_items_that_have_no_vector_are_alone() -> None:
    block = Block(numbers=np.array([1, 4]), rows=np.ones((2, 3), "f4"))
    found = grouped(lambda: [block], 6, 0.9)
    assert found.first.tolist() == [0, 1, 2, 3, 1, 5]
    assert found.is_there.tolist() == [False, True, False, False, True, False]


def test_progress_counts_every_item() -> None:
    told: list[int] = []
    grouped(reader(clusters(50), 7), 50, 0.9, outer_bytes=500, progress=told.append)
    assert sum(told) == 50
    assert len(told) > 1


@pytest.mark.parametrize("threshold", [0, -0.1, 1.01, float("nan")])
def test_a_threshold_out_of_range_is_refused(threshold: float) -> None:
    with pytest.raises(ConfigError, match=r"above 0 and at most 1, such as 0\.95, got"):
        grouped(reader(clusters(2), 1), 2, threshold)


def test_several_vectors_of_an_item_are_refused() -> None:
    block = Block(numbers=np.array([0]), rows=np.ones((2, 3), "f4"), lengths=np.array([2]))
    with pytest.raises(ConfigError, match="one for each token"):
        grouped(lambda: [block], 1, 0.9)
