"""The seconds that a run says are left: near the truth from the beginning, whatever the order of
the files' sizes and however many items are in progress."""

import heapq
import itertools
import random

import pytest

from mmdeploy_llm.batch.file_source import FEWEST, mixed, sizes_of
from mmdeploy_llm.batch.progress.clock import Clock
from mmdeploy_llm.batch.sources import open_files
from mmdeploy_llm.data.records.ids import Selection
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.text.display import duration


def simulated(costs, num_slots, sizes=None):
    """Runs items of these costs (seconds) in so many slots; returns for each moment at which one
    ends (seconds left in truth, as the clock says)."""
    time = [0.0]
    mean = None if sizes is None else sum(sizes) / len(sizes)
    clock = Clock(len(costs), mean_size=mean, now=lambda: time[0])
    todo, running, said = iter(enumerate(costs)), [], []

    def begin(key, cost):
        clock.begin(key, None if sizes is None else sizes[key])
        heapq.heappush(running, (time[0] + cost, key))

    for key, cost in itertools.islice(todo, num_slots):
        begin(key, cost)
    while running:
        time[0], key = heapq.heappop(running)
        clock.end(key)
        said.append((time[0], clock.moment().seconds_left))
        if more := next(todo, None):
            begin(*more)
    return [(time[0] - now, left) for now, left in said if left is not None]


def skewed(tmp_path, num):
    """Files in the order of their sizes: many small ones, then few large ones; cost ~ size."""
    sizes = sorted(int(100 * 2 ** random.Random(seed).uniform(0, 8)) for seed in range(num))
    for number, size in enumerate(sizes):
        (tmp_path / f"{number:04d}.png").write_bytes(bytes(size))
    return [str(tmp_path / f"{number:04d}.png") for number in range(num)]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("num_slots", [1, 8, 36])
@pytest.mark.parametrize("fixed", [0.0, 2.0, 50.0])
def test_a_skewed_folder_says_what_is_left_within_a_factor(tmp_path, num_slots, fixed):
    """The seconds of an item: with its size, independent of it, and in between."""
    paths = skewed(tmp_path, 400)
    source = open_files([str(tmp_path)], SamplingParams(), Selection())
    items = list(source)
    order, sizes = [item.path for item in items], [item.size for item in items]
    assert sorted(order) == paths != order
    said = simulated([fixed + size / 1000 for size in sizes], num_slots, sizes)
    assert len(said) > 350
    whole = max(truth for truth, _ in said)
    for truth, left in said:
        if truth > 0.5 * whole:  # later the few large ones in progress count
            assert truth / 2 < left < truth * 2, (truth, left)


def test_without_the_mixing_it_would_be_far_from_the_truth(tmp_path):
    sizes = list(sizes_of(skewed(tmp_path, 400)).values())
    said = simulated([size / 1000 for size in sizes], 8)
    truth, left = said[20]
    assert left < truth / 4


@pytest.mark.parametrize("num_slots", [1, 4, 64])
def test_equal_items_that_end_together(num_slots):
    for truth, left in simulated([10.0] * 512, num_slots):
        if truth > 100:
            assert truth / 2.1 < left < truth * 2.1


@pytest.mark.parametrize("num_slots", [2, 8, 16])
@pytest.mark.parametrize("cost", [lambda number: 1.0, lambda number: 0.1 + number % 7, float])
def test_as_long_as_items_are_left_time_is(num_slots, cost):
    """`0 s to go` stood there while six to nine items were left."""
    costs = [cost(number) for number in range(1, 41)]
    for sizes in (None, [int(100 * own) for own in costs], [100] * 40):
        for truth, left in simulated(costs, num_slots, sizes):
            assert truth == 0 or left > 0.01 * truth


def test_nothing_is_said_without_a_total_and_before_some_have_ended():
    clock = Clock(None)
    for _ in range(10):
        clock.begin(1)
        clock.end(1)
    assert clock.moment().seconds_left is None
    assert clock.moment().num_left is None
    clock = Clock(100, num_before=20)
    clock.begin(1)
    clock.end(1)
    moment = clock.moment()
    assert (moment.seconds_left, moment.num_left, moment.num_ended) == (None, 79, 1)


def test_an_item_done_again_counts_for_the_speed_only():
    clock = Clock(10, num_before=10)
    clock.begin(1)
    clock.end(1, is_new=False)
    assert clock.moment().num_left == 0
    assert clock.moment().seconds_left == 0


def test_few_files_stay_in_their_order_and_more_are_always_mixed_alike(tmp_path):
    names = [f"absent-{number}" for number in range(FEWEST)]
    sizes = sizes_of([*names[2:], "nul\0", "x" * 5000])
    assert set(sizes.values()) == {0}
    assert mixed(sizes) == mixed(sizes) != [*sizes]
    assert sorted(mixed(sizes)) == sorted(sizes)
    assert mixed(sizes_of(names[1:])) == names[1:]
    assert mixed({}) == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((0, "0 s"), (0.02, "0.1 s"), (0.44, "0.4 s"), (0.96, "1 s"), (1, "1 s"), (59.4, "59 s")),
        *((65, "1 min 05 s"), (7800, "2 h 10 min"), (266400, "3 days 02 h")),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text
