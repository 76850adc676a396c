"""The sampler as a whole: greedy and random rows, rules, failures, preemption."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdeploy_llm.engine.runner.sampling.results import NOT_FINITE, NOTHING_ALLOWED

RANDOM = {"temperature": 0.9, "top_p": 0.95}

fields = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 40, 70, 10_000]),
        "top_p": st.sampled_from([0.0, 0.2, 0.7, 0.99]),
        "min_p": st.sampled_from([0.05, 0.5, 1.0]),
        "seed": st.integers(0, 922337203685477580),
        "repetition_penalty": st.sampled_from([0.8, 1.4]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 1.5]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_tokens": st.integers(0, 3),
        "logit_bias": st.dictionaries(st.integers(0, 40), st.floats(-20, 20), max_size=3),
        "logprobs": st.sampled_from([0, 1, 4]),
        "stop_token_ids": st.lists(st.integers(0, 49), max_size=3),
        "eos_token_ids": st.frozensets(st.integers(0, 49), max_size=2),
        "prompt_token_ids": st.lists(st.integers(0, 49), max_size=20),
        "bad_words_token_ids": st.lists(
            st.lists(st.integers(0, 49), min_size=1, max_size=3).map(tuple), max_size=3
        ).map(tuple),
    },
)


def steps_of(num_steps, num_rows, vocab_size, seed, dtype=torch.float32):
    """Returns the logits of several steps, [steps, rows, V]."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_steps, num_rows, vocab_size, generator=generator) * 3).to(dtype)


def run(sampler, steps, slots):
    return [sampler.sample(logits, slots) for logits in steps]


def test_greedy_chooses_the_first_of_equal_maxima(make_request, make_sampler):
    sampler = make_sampler([make_request() for _ in range(3)], 500)
    logits = steps_of(1, 3, 500, 0)[0]
    logits[1, [40, 9, 300]] = 50.0
    before = logits.clone()
    result = sampler.sample(logits, range(3))
    assert result.token_ids == logits.argmax(dim=1).tolist()
    assert result.token_ids[1] == 9
    assert result.errors == {}
    assert result.logprobs == (None, None, None)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("own", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}])
def test_each_form_of_greedy(make_request, make_sampler, own):
    sampler = make_sampler([make_request(**{**RANDOM, **own})], 500)
    for logits in steps_of(5, 1, 500, 1):
        assert sampler.sample(logits, [0]).token_ids == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("slots", [[2, 0], np.array([2, 0]), torch.tensor([2, 0])])
def test_slots_in_any_form_and_order(make_request, make_sampler, slots):
    requests = [make_request(logit_bias={7 + slot: 1000.0}) for slot in range(3)]
    result = make_sampler(requests, 50).sample(torch.zeros(2, 50), slots)
    assert result.token_ids == [9, 7]


@pytest.mark.full
@settings(max_examples=40, deadline=None)
@given(
    st.lists(fields, min_size=2, max_size=7),
    st.sampled_from([50, 64, 300, 20_001]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 2**31),
)
def test_alone_and_in_a_batch_are_bit_identical(
    make_request, make_sampler, rows, vocab_size, dtype, seed
):
    requests = [make_request(**row) for row in rows]
    steps = steps_of(3, len(rows), vocab_size, seed, dtype)
    together = run(make_sampler(requests, vocab_size), steps, range(len(rows)))
    for row, request in enumerate(requests):
        alone = make_sampler([request], vocab_size)
        for logits, result in zip(steps, together, strict=True):
            single = alone.sample(logits[row : row + 1], [0])
            assert single.token_ids == [result.token_ids[row]]
            assert single.logprobs == (result.logprobs[row],)
            assert single.errors.get(0) == result.errors.get(row)


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(fields, st.integers(1, 7), st.integers(0, 2**31))
def test_preempted_is_uninterrupted(make_request, make_sampler, row, num_before, seed):
    row = {**row, "reasoning_end_ids": (3, 4), "reasoning_max_tokens": 4}
    steps = steps_of(9, 1, 50, seed)
    whole = run(make_sampler([make_request(**row)], 50), steps, [0])
    tokens = tuple(result.token_ids[0] for result in whole[:num_before])
    if any(result.errors for result in whole):
        return
    sampler = make_sampler([make_request(**row, output_token_ids=tokens)], 50)
    assert run(sampler, steps[num_before:], [0]) == whole[num_before:]


@pytest.mark.full
@settings(max_examples=60, deadline=None)
@given(fields, st.integers(0, 2**31))
def test_tokens_come_from_the_allowed_set(make_request, make_sampler, row, seed):
    request = make_request(**{**row, **RANDOM})
    params, output = request.params, []
    sampler = make_sampler([request], 50)
    for step, logits in enumerate(steps_of(6, 1, 50, seed)):
        result = sampler.sample(logits, [0])
        if result.errors:
            assert result.errors == {0: NOTHING_ALLOWED}
            return
        token_id = result.token_ids[0]
        before = [*request.prompt_token_ids, *output]
        after = [*before, token_id]
        if step < params.min_tokens:
            assert token_id not in {*request.eos_token_ids, *params.stop_token_ids}
        for ids in request.bad_words_token_ids:
            assert len(after) < len(ids) or tuple(after[-len(ids) :]) != ids
        size = params.no_repeat_ngram_size
        if size and len(after) >= size:
            seen = [before[i : i + size] for i in range(len(before) - size + 1)]
            assert after[-size:] not in seen
        output.append(token_id)


def test_every_step_has_a_random_number_of_its_own(make_request, make_sampler):
    sampler = make_sampler([make_request(temperature=1.0, seed=5)], 100)
    tokens = [sampler.sample(torch.zeros(1, 100), [0]).token_ids[0] for _ in range(300)]
    assert len(set(tokens)) > 80


def test_seeds_differ_and_repeat(make_request, make_sampler):
    def tokens(seed):
        sampler = make_sampler([make_request(temperature=1.0, seed=seed)], 100)
        return [result.token_ids[0] for result in run(sampler, torch.zeros(20, 1, 100), [0])]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("own", [{}, RANDOM, {"repetition_penalty": 1.2}, {"logprobs": 2}])
def test_a_row_that_is_not_finite_fails_alone(make_request, make_sampler, bad, own):
    requests = [make_request(**own, seed=seed) for seed in range(4)]
    steps = steps_of(2, 4, 500, 2)
    clean = run(make_sampler(requests, 500), steps, range(4))
    steps[0, 2, 123] = bad
    first, second = run(make_sampler(requests, 500), steps, range(4))
    assert first.errors == {2: NOT_FINITE}
    assert (first.token_ids[2], first.logprobs[2]) == (0, None)
    for row in (0, 1, 3):
        assert first.token_ids[row] == clean[0].token_ids[row]
        assert first.logprobs[row] == clean[0].logprobs[row]
        assert second.token_ids[row] == clean[1].token_ids[row]


def test_nan_at_a_banned_token_is_still_an_error(make_request, make_sampler):
    logits = torch.zeros(1, 50)
    logits[0, 7] = torch.nan
    sampler = make_sampler([make_request(bad_words_token_ids=((7,),))], 50)
    assert sampler.sample(logits, [0]).errors == {0: NOT_FINITE}


@pytest.mark.parametrize("own", [{}, RANDOM])
def test_a_row_with_every_token_banned_fails_alone(make_request, make_sampler, own):
    everything = tuple((token_id,) for token_id in range(50))
    requests = [
        make_request(**own),
        make_request(**own, bad_words_token_ids=everything),
        make_request(**own, bad_words_token_ids=everything[1:]),
    ]
    logits = steps_of(1, 3, 50, 3)[0]
    result = make_sampler(requests, 50).sample(logits, range(3))
    assert result.errors == {1: NOTHING_ALLOWED}
    assert list(result.unmet) == [1]
    assert result.token_ids[1:] == [0, 0]
    alone = make_sampler(requests[:1], 50).sample(logits[:1], [0])
    assert alone.token_ids == result.token_ids[:1]


def test_a_failed_row_keeps_its_state(make_request, make_sampler):
    steps = steps_of(4, 1, 200, 4)
    sampler = make_sampler([make_request(**RANDOM)], 200)
    expected = run(make_sampler([make_request(**RANDOM)], 200), steps, [0])
    broken = torch.full((1, 200), torch.nan)
    assert sampler.sample(steps[0], [0]) == expected[0]
    assert sampler.sample(broken, [0]).errors
    assert run(sampler, steps[1:], [0]) == expected[1:]


def test_min_tokens_end(make_request, make_sampler):
    logits = torch.zeros(1, 50)
    logits[0, [4, 5, 6]] = torch.tensor([9.0, 8.0, 7.0])
    request = make_request(min_tokens=2, eos_token_ids={4}, stop_token_ids=(5,))
    sampler = make_sampler([request], 50)
    assert [sampler.sample(logits, [0]).token_ids[0] for _ in range(3)] == [6, 6, 4]


def test_logprobs_are_of_the_unchanged_logits(make_request, make_sampler):
    request = make_request(logit_bias={11: 100.0}, temperature=0.5, logprobs=2)
    logits = steps_of(1, 1, 50, 5)[0]
    result = make_sampler([request], 50).sample(logits, [0])
    expected = logits.log_softmax(dim=1)[0]
    (entry,) = result.logprobs
    assert list(entry) == [11, *logits[0].topk(2).indices.tolist()]
    for token_id, value in entry.items():
        assert value.logprob == pytest.approx(expected[token_id].item(), abs=1e-5)
    assert [value.rank for value in entry.values()][1:] == [1, 2]


def test_the_end_of_thinking_is_forced_past_every_rule(make_request, make_sampler):
    everything_but_9 = tuple((token_id,) for token_id in range(50) if token_id != 9)
    requests = [
        make_request(reasoning_max_tokens=2, reasoning_end_ids=(20, 21), logprobs=0),
        make_request(
            reasoning_max_tokens=2, reasoning_end_ids=(20, 21), bad_words_token_ids=everything_but_9
        ),
        make_request(reasoning_max_tokens=2),
        make_request(reasoning_max_tokens=2, reasoning_end_ids=(20,), **RANDOM),
    ]
    logits = torch.zeros(4, 50)
    logits[:, 9] = 90.0
    results = run(make_sampler(requests, 50), [logits] * 5, range(4))
    assert [result.errors for result in results] == [{}] * 5
    by_row = list(zip(*(result.token_ids for result in results), strict=True))
    assert by_row == [(9, 9, 20, 21, 9), (9, 9, 20, 21, 9), (9,) * 5, (9, 9, 20, 9, 9)]
    assert list(results[2].logprobs[0]) == [20]
    assert results[2].logprobs[0][20].rank == 21  # ties go by id, and token 9 is first


def test_slots_are_used_again(make_request, make_sampler):
    sampler = make_sampler([make_request(logit_bias={3: 50.0}, **RANDOM, logprobs=1)], 50)
    sampler.sample(torch.zeros(1, 50), [0])
    sampler.remove(0)
    sampler.remove(0)
    sampler.add(0, make_request())
    result = sampler.sample(torch.zeros(1, 50), [0])
    assert (result.token_ids, result.logprobs) == ([0], (None,))


def test_slot_numbers_do_not_matter(make_request, make_sampler):
    steps = steps_of(3, 4, 300, 6)
    requests = [make_request(**RANDOM, seed=seed) for seed in range(4)]
    expected = [result.token_ids for result in run(make_sampler(requests, 300), steps, range(4))]
    for order in itertools.islice(itertools.permutations(range(4)), 1, 24, 5):
        sampler = make_sampler([], 300, num_slots=9)
        for slot, request in zip(order, requests, strict=True):
            sampler.add(slot + 5, request)
        slots = [slot + 5 for slot in order]
        assert [result.token_ids for result in run(sampler, steps, slots)] == expected


def test_greedy_rows_are_not_copied(make_request, make_sampler, monkeypatch):
    """The fast path only reads the logits."""
    sampler = make_sampler([make_request(eos_token_ids={1}) for _ in range(4)], 1000)

    def forbidden(*_):
        raise AssertionError

    for name in ("adjust", "draw", "take_rows", "logprobs_of"):
        monkeypatch.setattr(f"mmdeploy_llm.engine.runner.sampling.sampler.{name}", forbidden)
    logits = steps_of(1, 4, 1000, 7)[0]
    assert sampler.sample(logits, range(4)).token_ids == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize("own", [{}, RANDOM])
def test_a_forced_token_needs_no_other_to_be_allowed(make_request, make_sampler, own):
    request = make_request(
        **own,
        output_token_ids=(1, 1),
        reasoning_max_tokens=2,
        reasoning_end_ids=(20, 21),
        bad_words_token_ids=tuple((token_id,) for token_id in range(50)),
    )
    results = run(make_sampler([request], 50), torch.zeros(3, 1, 50), [0])
    assert [result.token_ids for result in results] == [[20], [21], [0]]
    assert [result.errors for result in results] == [{}, {}, {0: NOTHING_ALLOWED}]
