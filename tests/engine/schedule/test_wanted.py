"""Requests that want no text: what they reserve, when they end, and what the cache gives them."""

import pytest

from mmdeploy_llm.values.pooling_request import PoolingRequest


def wanted(**options):
    return PoolingRequest(**{"what": "vector", "pooling": "last", **options})


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64])
def test_it_ends_with_its_prompt_and_samples_nothing(kit, num_tokens):
    loop = kit.Loop(kit.make_config(num_blocks=16))
    request = loop.add(kit.make_request("a", num_tokens, wanted=wanted(pooling="mean")))
    loop.run()
    assert len(loop.plans) == -(-num_tokens // 16)
    assert loop.reasons == {"a": "stop"}
    assert loop.vectors["a"] == kit.expected_states(request)
    assert not any(item.samples for plan in loop.plans for item in plan.scheduled)
    assert request.first_token_time == request.last_token_time == loop.now
    assert request.output_token_ids == []


def test_a_prompt_over_the_limit_is_refused(kit):
    loop = kit.Loop(kit.make_config())
    loop.add(kit.make_request("a", 65, wanted=wanted()))
    loop.run()
    assert loop.ended["a"].failure.message.startswith("65 prompt tokens are more than")


def test_it_leaves_no_block_free_for_an_answer(kit):
    """Requests that generate reserve a block each; these fill the pool to its last block."""
    loop = kit.Loop(kit.make_config(num_blocks=8, max_num_batched_tokens=64))
    for name in "abcd":
        loop.add(kit.make_request(name, 8, wanted=wanted()))
    assert len(loop.step().new) == 4


@pytest.mark.parametrize(
    ("options", "num_cached"),
    [
        ({}, 28),
        ({"what": "score"}, 28),
        ({"pooling": "cls"}, 0),
        ({"pooling": "mean"}, 0),
        ({"what": "token_vectors"}, 0),
        ({"pooling": "mean", "num_skipped": 13}, 12),
        ({"what": "token_vectors", "num_skipped": 12}, 12),
        ({"what": "likelihood", "num_skipped": 13}, 12),
        ({"what": "likelihood", "num_skipped": 12}, 8),
    ],
)
def test_the_cache_gives_what_no_state_is_needed_of(kit, options, num_cached):
    loop = kit.Loop(kit.make_config(num_blocks=40))
    loop.add(kit.make_request("first", range(100, 130)))
    loop.run()
    request = loop.add(kit.make_request("a", range(100, 130), wanted=wanted(**options)))
    loop.run()
    assert request.num_cached_tokens == num_cached
    assert loop.vectors["a"] == kit.expected_states(request)


def test_labels_wait_for_the_prompt_that_they_share(kit):
    loop = kit.Loop(kit.make_config(num_blocks=64, max_num_batched_tokens=64))
    labels = [
        kit.make_request(
            str(number),
            [*range(100, 133), 200 + number],
            wanted=wanted(what="likelihood", num_skipped=33),
            is_shared=True,
        )
        for number in range(3)
    ]
    loop.add(*labels)
    loop.run()
    assert [request.num_cached_tokens for request in labels] == [0, 32, 32]
