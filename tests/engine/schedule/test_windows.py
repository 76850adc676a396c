"""Blocks of layers with a window: how many a request holds, which prefixes it can start with."""

import pytest

WINDOW = 6  # tokens; blocks have 4, so that a request holds 4 blocks at most, see blocks_of_window


def loop_of(kit, **changes):
    return kit.Loop(kit.make_config(window=WINDOW, **{"num_window_blocks": 24, **changes}))


def held(loop, name="a"):
    return loop.scheduler._requests.states[name].window.held


def windows(loop):
    return loop.scheduler._requests.windows


def test_a_long_request_holds_its_window_only(kit):
    loop = loop_of(kit, num_window_blocks=8)
    loop.add(kit.make_request("a", 40, max_tokens=20))
    counts = []
    while loop.scheduler.has_work:
        loop.step()
        if not loop.ended:
            counts.append(len(held(loop)))
    assert max(counts) <= 3
    assert windows(loop).pool.num_free == 8


def test_a_request_waits_while_the_windows_of_others_fill_the_pool(kit):
    """Four blocks each and four of a step: the second request waits, and nobody is preempted."""
    loop = loop_of(kit, num_window_blocks=11)
    one, two = (kit.make_request(name, 20, max_tokens=20) for name in "ab")
    loop.add(one, two)
    for _ in range(5):
        loop.step()
    assert loop.scheduler.stats().num_waiting == 1
    loop.run()
    assert (one.num_preemptions, two.num_preemptions) == (0, 0)
    assert loop.reasons == {"a": "length", "b": "length"}


def test_short_requests_take_no_more_than_their_own_blocks(kit):
    loop = loop_of(kit, num_window_blocks=8)
    loop.add(*(kit.make_request(f"r{n}", 5, max_tokens=3) for n in range(4)))
    loop.step()
    assert loop.scheduler.stats().num_running == 4


def test_a_prefix_needs_the_last_window_alone(kit):
    loop = loop_of(kit)
    prompt = list(range(100, 132))
    loop.add(kit.make_request("a", [*prompt, 1], max_tokens=2))
    loop.run()
    # Other content evicts the oldest blocks, which are the first ones of the prompt.
    pool = windows(loop).pool
    first = pool.find(kit.keys(prompt, 0))
    taken = pool.allocate(len(pool._empty) + 1)
    assert taken[-1] == first
    assert pool.find(kit.keys(prompt, 0)) is None
    pool.free(taken)
    second = loop.add(kit.make_request("b", [*prompt, 2], max_tokens=2))
    loop.run()
    assert second.num_cached_tokens == 32


def test_a_prefix_ends_where_the_window_is_still_cached(kit):
    loop = loop_of(kit, num_window_blocks=12, max_idle_window_blocks=12)
    prompt = list(range(100, 132))
    loop.add(kit.make_request("a", [*prompt, 1], max_tokens=2))
    loop.run()
    pool = windows(loop).pool
    lost = pool.find(kit.keys(prompt, 7))
    pool.allocate(0, [lost])  # so that another one is evicted first
    pool.free([lost])
    others = pool.allocate(len(pool._empty) + 7)
    pool.free(others)
    assert pool.find(kit.keys(prompt, 6)) is None
    second = loop.add(kit.make_request("b", [*prompt, 2], max_tokens=2))
    loop.run()
    assert second.num_cached_tokens == 0


@pytest.mark.parametrize("count", [1, 5])
def test_without_a_prefix_cache_no_block_stays(kit, count):
    loop = loop_of(kit, enable_prefix_caching=False)
    for number in range(count):
        loop.add(kit.make_request(f"r{number}", 30, max_tokens=9))
    loop.run()
    assert windows(loop).pool.num_free == len(windows(loop).pool._empty) == 24
