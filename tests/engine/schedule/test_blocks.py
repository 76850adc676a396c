"""Block pool and prefix keys: sharing, eviction order, what makes content equal."""

import pytest

from mmdeploy_llm.engine.schedule.blocks import BlockPool
from mmdeploy_llm.engine.schedule.prefix import PrefixKeys


def make_pool(num_blocks=8, enable_prefix_caching=True, max_idle_blocks=None):
    return BlockPool(
        num_blocks=num_blocks,
        block_size=4,
        enable_prefix_caching=enable_prefix_caching,
        max_idle_blocks=max_idle_blocks,
    )


def keys_of(request):
    return PrefixKeys(request, 4)


def store(pool, request):
    """Computes the request's full blocks; returns its block table."""
    num_blocks = -(-request.num_tokens // 4)
    table = pool.allocate(num_blocks)
    pool.register(table, keys_of(request), 0, request.num_tokens // 4)
    return table


def test_blocks_are_handed_out_once_and_come_back():
    pool = make_pool(num_blocks=4)
    table = pool.allocate(3)
    assert len(set(table)) == 3
    assert pool.num_free == 1
    assert not pool.can_allocate(2)
    assert pool.can_allocate(1)
    pool.check_integrity([table])
    pool.free(table)
    assert pool.num_free == 4
    pool.check_integrity([])


def test_allocating_more_than_is_free_is_our_mistake():
    with pytest.raises(AssertionError):
        make_pool(num_blocks=2).allocate(3)


def test_match_finds_the_longest_beginning(kit):
    pool = make_pool()
    table = store(pool, kit.make_request("a", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    other = kit.make_request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    half = kit.make_request("c", [1, 2, 3, 4, 5, 6, 7, 0, 9])
    assert pool.match(keys_of(other), 9) == table[:2]
    assert pool.match(keys_of(half), 9) == table[:1]


def test_match_leaves_one_token_to_compute(kit):
    pool = make_pool()
    table = store(pool, kit.make_request("a", range(8)))
    assert pool.match(keys_of(kit.make_request("b", range(8))), 8) == table[:1]
    assert pool.match(keys_of(kit.make_request("c", range(9))), 9) == table


def test_equal_tokens_after_another_prefix_do_not_match(kit):
    pool = make_pool()
    store(pool, kit.make_request("a", [1, 2, 3, 4, 5, 6, 7, 8]))
    other = kit.make_request("b", [5, 6, 7, 8, 5, 6, 7, 8, 9])
    assert pool.match(keys_of(other), 9) == []


@pytest.mark.parametrize(
    ("media", "num_matched"),
    [
        (((1, "cat", 6),), 2),
        (((1, "dog", 6),), 0),
        (((1, "cat", 5), (6, "cat", 1)), 1),  # same tokens, but another item starts in block 1
        (((1, "cat", 3), (4, "cat", 3)), 1),  # equal placeholders and keys, another offset
    ],
)
def test_media_are_part_of_the_content(kit, media, num_matched):
    pool = make_pool()
    store(pool, kit.make_request("a", range(9), media=((1, "cat", 6),)))
    other = kit.make_request("b", range(9), media=media)
    assert len(pool.match(keys_of(other), 9)) == num_matched


def test_media_key_and_offset_cannot_be_confused(kit):
    """Content is hashed without ambiguity: ("a", 1) and "a1" have different keys."""
    one = kit.make_request("a", range(4), media=((0, "x', 0), ('y", 2),))
    two = kit.make_request("b", range(4), media=((0, "x", 1), (1, "y", 1)))
    assert keys_of(one).key(0) != keys_of(two).key(0)


def test_keys_cover_generated_tokens(kit):
    short = kit.make_request("a", [1, 2, 3])
    short.output_token_ids.extend([4, 5, 6, 7, 8])
    long = kit.make_request("b", [1, 2, 3, 4, 5, 6, 7, 8])
    assert [keys_of(short).key(i) for i in (0, 1)] == [keys_of(long).key(i) for i in (0, 1)]


def test_key_of_a_block_that_is_not_full_is_our_mistake(kit):
    with pytest.raises(AssertionError, match="not full"):
        keys_of(kit.make_request("a", range(6))).key(1)


def test_shared_blocks_live_until_the_last_user_is_gone(kit):
    pool = make_pool(num_blocks=4)
    request = kit.make_request("a", range(9))
    table = store(pool, request)
    matched = pool.match(keys_of(request), 9)
    second = pool.allocate(1, matched)
    assert second[:2] == table[:2]
    assert pool.num_free == 0
    pool.check_integrity([table, second])
    pool.free(table)
    assert pool.num_free == 1
    pool.check_integrity([second])
    pool.free(second)
    assert pool.num_free == 4


def test_freed_content_is_kept_and_revived(kit):
    pool = make_pool(num_blocks=4)
    request = kit.make_request("a", range(9))
    table = store(pool, request)
    pool.free(table)
    matched = pool.match(keys_of(request), 9)
    assert matched == table[:2]
    assert pool.can_allocate(2, matched)
    assert not pool.can_allocate(3, matched), "revived blocks are not free for others"
    pool.check_integrity([pool.allocate(2, matched)])


def test_eviction_takes_the_oldest_and_the_ends_first(kit):
    pool = make_pool(num_blocks=4)
    old, young = kit.make_request("a", range(8)), kit.make_request("b", range(50, 58))
    for table in [store(pool, old), store(pool, young)]:
        pool.free(table)
    num_kept = []
    for _ in range(4):
        pool.allocate(1)
        num_kept.append([len(pool.match(keys_of(request), 9)) for request in (old, young)])
    assert num_kept == [[1, 2], [0, 2], [0, 1], [0, 0]]


def test_blocks_without_content_are_used_before_any_eviction(kit):
    pool = make_pool(num_blocks=4)
    request = kit.make_request("a", range(9))
    pool.free(store(pool, request))
    pool.allocate(2)
    assert len(pool.match(keys_of(request), 9)) == 2


def test_few_idle_blocks_are_kept_and_touched_ones_are_used_first(kit):
    """A long series of different requests uses the same few blocks again and again."""
    pool = make_pool(num_blocks=100, max_idle_blocks=3)
    seen = set()
    for number in range(50):
        table = store(pool, kit.make_request(str(number), range(100 * number, 100 * number + 8)))
        seen.update(table)
        pool.free(table)
        pool.check_integrity([])
    assert len(seen) <= 3 + 2
    last = kit.make_request("again", [*range(4900, 4908), 1])
    assert len(pool.match(keys_of(last), 9)) == 2
    first = kit.make_request("first", [*range(8), 1])
    assert pool.match(keys_of(first), 9) == []


def test_use_makes_a_block_young_again(kit):
    pool = make_pool(num_blocks=2)
    first, second = kit.make_request("a", range(5)), kit.make_request("b", range(50, 55))
    for request in (first, second):
        table = pool.allocate(1)
        pool.register(table, keys_of(request), 0, 1)
        pool.free(table)
    pool.free(pool.allocate(0, pool.match(keys_of(first), 5)))
    pool.allocate(1)
    assert pool.match(keys_of(first), 5)
    assert not pool.match(keys_of(second), 5)


def test_the_same_content_twice_keeps_the_first_block(kit):
    pool = make_pool()
    request = kit.make_request("a", range(9))
    first, second = store(pool, request), store(pool, request)
    assert pool.match(keys_of(request), 9) == first[:2]
    pool.check_integrity([first, second])
    pool.free(second)
    pool.check_integrity([first])


def test_without_prefix_caching_nothing_is_kept_or_hashed(kit):
    class NoKeys:
        def key(self, index):
            raise AssertionError("hashed for nothing")

    pool = make_pool(enable_prefix_caching=False)
    table = pool.allocate(2)
    pool.register(table, NoKeys(), 0, 2)
    pool.free(table)
    assert pool.match(NoKeys(), 9) == []
    pool.check_integrity([])


def test_integrity_check_finds_a_lost_and_a_doubly_used_block():
    pool = make_pool()
    table = pool.allocate(2)
    with pytest.raises(AssertionError):
        pool.check_integrity([])
    with pytest.raises(AssertionError):
        pool.check_integrity([table, table])
