"""Limits: configurations that could starve a request, and requests that can never run."""

import pytest

from mmdeploy_llm.engine.schedule.limits import refusal


@pytest.mark.parametrize(
    ("prompt", "options", "config", "code", "words"),
    [
        (0, {}, {}, 400, "no tokens"),
        (64, {}, {}, 400, "max_model_len = 64"),
        (60, {"min_tokens": 5, "max_tokens": 9}, {}, 400, "at least 5"),
        (20, {}, {"num_blocks": 4}, 400, "4 blocks of 4 tokens"),
        (16, {"min_tokens": 2, "max_tokens": 2}, {"num_blocks": 4}, 400, "16 prompt tokens"),
        (40, {"media": ((1, "a", 17),)}, {}, 413, "17 tokens, the encoder cache holds 16"),
        (
            40,
            {"media": ((1, "a", 17),)},
            {"atomic_media": True, "encoder_cache_tokens": 30},
            413,
            "17 tokens, which this model must compute in one step of 16",
        ),
        (
            40,
            {"media": ((1, "a", 9), (10, "b", 8))},
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            413,
            "17 tokens, needed in one step",
        ),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_numbers(
    kit, prompt, options, config, code, words
):
    failure = refusal(kit.make_request("r", prompt, **options), kit.make_config(**config))
    assert failure is not None
    assert failure.code == code
    assert words in failure.message


@pytest.mark.parametrize(
    ("prompt", "options", "config"),
    [
        (63, {}, {}),
        (16, {"max_tokens": 1}, {"num_blocks": 4}),
        (40, {"media": ((1, "a", 16), (17, "b", 16))}, {"atomic_media": True}),
        (  # two crops with text between them, together longer than a step
            40,
            {"media": ((1, "a", 24, (*range(12), *range(20, 32))),)},
            {"atomic_media": True, "encoder_cache_tokens": 30},
        ),
        (
            40,
            {"media": ((1, "a", 9), (10, "a", 9))},
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
        ),
    ],
)
def test_a_request_that_just_fits_is_accepted_and_runs(kit, prompt, options, config):
    loop = kit.Loop(kit.make_config(**config))
    request = loop.add(kit.make_request("r", prompt, **options))
    assert refusal(request, loop.config) is None
    loop.run()
    assert loop.reasons["r"] == "length"
