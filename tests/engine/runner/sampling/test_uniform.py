"""The random numbers are reproducible, evenly spread and independent of each other."""

import numpy as np

from mmdeploy_llm.engine.runner.sampling.draw import uniforms

MASK = 2**64 - 1


def number(seed, position):
    """Computes the documented hash with Python integers."""

    def mix(value):
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
        return value ^ (value >> 31)

    golden = 0x9E3779B97F4A7C15
    state = mix((seed + golden) & MASK)
    return (mix((state + (position + 1) * golden) & MASK) >> 11) / 2**53


def grid(seeds, positions):
    seeds, positions = np.meshgrid(seeds, positions)
    flat = [each.ravel().astype(np.uint64) for each in (seeds, positions)]
    return uniforms(*flat).reshape(seeds.shape)


def is_even(counts):
    """Returns whether chi-square is within five standard deviations of its mean."""
    expected = counts.sum() / counts.size
    free = counts.size - 1
    return abs(((counts - expected) ** 2 / expected).sum() - free) < 5 * np.sqrt(2 * free)


def test_numbers_equal_splitmix64():
    pairs = [(0, 0), (1, 0), (0, 1), (922337203685477580, 131072), (12345, 67)]
    found = uniforms(*np.array(pairs, dtype=np.uint64).T.copy())
    assert found.tolist() == [number(*pair) for pair in pairs]


def test_first_outputs_of_the_published_generator():
    # splitmix64 from state 0 gives e220a8397b1dcdaf, which is how the seed 0 is mixed.
    golden = 0x9E3779B97F4A7C15
    first = np.array([0], dtype=np.uint64)
    state = (0xE220A8397B1DCDAF + golden) & MASK
    value = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    assert uniforms(first, first)[0] == ((value ^ (value >> 31)) >> 11) / 2**53


def test_numbers_are_even_along_positions_and_along_seeds():
    for numbers in (grid([7], range(50_000)), grid(range(50_000), [3])):
        assert numbers.min() >= 0
        assert numbers.max() < 1
        assert is_even(np.histogram(numbers, bins=100, range=(0, 1))[0])


def test_neighbours_are_independent():
    numbers = grid(range(300), range(300))  # [positions, seeds]
    for shifted in ((1, 0), (0, 1), (1, 1)):
        pairs = np.histogram2d(
            numbers[:-1, :-1].ravel(),
            np.roll(numbers, (-shifted[0], -shifted[1]), (0, 1))[:-1, :-1].ravel(),
            bins=16,
            range=((0, 1), (0, 1)),
        )[0]
        assert is_even(pairs)


def test_no_two_alike():
    assert len(np.unique(grid(range(200), range(200)))) == 40_000
