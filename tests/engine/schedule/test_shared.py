"""Questions about one picture at once: the first computes what they share, the others wait for it
while requests with other prompts start."""

import pytest

CONFIG = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "max_model_len": 128,
    "num_blocks": 64,
    "block_size": 8,
    "encoder_cache_tokens": 256,
}
KINDS = {
    "one cache": {},
    "states": {"num_state_rows": 2 + 2 * 8 + 16, "max_idle_states": 16},
    "windows": {"window": 16, "num_window_blocks": 64},
    "atomic": {"atomic_media": True},
    "atomic, windows": {"atomic_media": True, "window": 64, "num_window_blocks": 64},
}


def questions(kit, number, *, is_shared=True):
    """Three questions about one picture of 43 tokens after a text of 3."""
    return [
        kit.make_request(
            f"{number}.{question}",
            [1, 2, 3, *[0] * 43, *range(100 + 20 * question, 117 + 20 * question)],
            media=[(3, f"picture-{number}", 43)],
            max_tokens=3,
            is_shared=is_shared,
        )
        for question in range(3)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_picture_is_computed_once(kit, kind):
    loop = kit.Loop(kit.make_config(**CONFIG, **KINDS[kind]))
    asked = [request for number in range(2) for request in questions(kit, number)]
    for request in asked:
        loop.add(request)
    loop.run()
    assert [request.num_cached_tokens for request in asked] == [0, 40, 40] * 2
    assert [item.request_id for item in loop.plans[0].scheduled] == ["0.0", "1.0"]
    assert loop.executor.num_encodes == {"picture-0": 1, "picture-1": 1}
    for request in asked:
        assert loop.tokens[request.request_id] == kit.expected_tokens(request, 3)


def test_unknown_neighbours_do_not_wait(kit):
    loop = kit.Loop(kit.make_config(**CONFIG))
    asked = questions(kit, 0, is_shared=False)
    for request in asked:
        loop.add(request)
    loop.run()
    assert [request.num_cached_tokens for request in asked] == [0, 0, 0]


def test_a_prefix_in_several_steps_is_waited_for_to_its_end(kit):
    loop = kit.Loop(kit.make_config(**{**CONFIG, "max_num_batched_tokens": 20}))
    asked = questions(kit, 0)
    for request in asked:
        loop.add(request)
    loop.run()
    assert [request.num_cached_tokens for request in asked] == [0, 40, 40]


@pytest.mark.parametrize("end", ["fails", "aborts"])
def test_who_waits_goes_on_when_the_first_ends(kit, end):
    loop = kit.Loop(kit.make_config(**CONFIG))
    first, second, third = questions(kit, 0)
    for request in (first, second, third):
        loop.add(request)
    loop.step(failing={first.request_id} if end == "fails" else ())
    loop.step(aborts=[first.request_id] if end == "aborts" else ())
    loop.run()
    wanted = [0, 40] if end == "fails" else [40, 40]
    assert [second.num_cached_tokens, third.num_cached_tokens] == wanted
    assert loop.tokens[third.request_id] == kit.expected_tokens(third, 3)


@pytest.mark.parametrize("changes", [{"enable_prefix_caching": False}, {"prompt_logprobs": 1}])
def test_nothing_waits_for_what_it_cannot_use(kit, changes):
    changes = dict(changes)
    options = {"prompt_logprobs": changes.pop("prompt_logprobs", None)}
    loop = kit.Loop(kit.make_config(**CONFIG, **changes))
    for request in questions(kit, 0):
        request.params = request.params.model_copy(update=options)
        loop.add(request)
    loop.run()
    assert len(loop.plans[0].scheduled) == 3
