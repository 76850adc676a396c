"""The state kept of a sequence, compared with searches through the whole sequence."""

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from mmdeploy_llm.engine.runner.sampling.trackers import (
    BadSequences,
    NGrams,
    ThinkingCap,
    TokenCounts,
)

few_tokens = st.lists(st.integers(0, 4), max_size=40)


@settings(deadline=None)
@given(few_tokens, few_tokens)
def test_counts(prompt, output):
    counts = TokenCounts(prompt, 5)
    for token_id in output:
        counts.append(token_id)
    found = dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert found == {one: output.count(one) for one in {*prompt, *output}}


def test_counts_grow_beyond_their_first_size():
    counts = TokenCounts((), 1000)
    for token_id in range(1000):
        counts.append(token_id)
        counts.append(token_id)
    assert sorted(counts.ids.tolist()) == list(range(1000))
    assert set(counts.counts.tolist()) == {2.0}


@settings(deadline=None)
@given(few_tokens, few_tokens, st.integers(1, 5))
def test_ngrams(prompt, output, size):
    ngrams = NGrams(size, prompt)
    for token_id in output:
        ngrams.append(token_id)
    tokens = prompt + output
    seen = {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}
    tail = tokens[len(tokens) - size + 1 :] if size > 1 else []
    expected = {one for one in range(5) if (*tail, one) in seen and len(tail) == size - 1}
    assert set(ngrams.banned()) == expected


def plainly_banned(output, size, window, may_repeat):
    """Looks at every n-gram in the window, as DeepSeek-OCR's processor does."""
    if len(output) < size:
        return set()
    prefix = tuple(output[len(output) - size + 1 :])
    begins = range(max(0, len(output) - window), len(output) - size + 1)
    grams = [tuple(output[i : i + size]) for i in begins]
    return {gram[-1] for gram in grams if gram[:-1] == prefix} - set(may_repeat)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 3), max_size=80),
    st.integers(1, 5),
    st.integers(0, 20),
    st.sets(st.integers(0, 3), max_size=2),
)
def test_ngrams_in_a_window(output, size, more, may_repeat):
    window = size + more
    ngrams = NGrams(size, window=window, may_repeat=may_repeat)
    for number, token_id in enumerate(output, 1):
        ngrams.append(token_id)
        assert set(ngrams.banned()) == plainly_banned(output[:number], size, window, may_repeat)
        assert len(ngrams._oldest) <= window


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_without_a_window_they_are_those_of_transformers(size):
    rule = transformers.NoRepeatNGramLogitsProcessor(size)
    output = torch.randint(0, 4, (60,), generator=torch.Generator().manual_seed(size))
    ngrams = NGrams(size, window=None)
    for number in range(1, 60):
        ngrams.append(int(output[number - 1]))
        logits = rule(output[None, :number], torch.zeros(1, 4))[0]
        assert set(ngrams.banned()) == set(torch.isinf(logits).nonzero()[:, 0].tolist())


def test_a_step_costs_no_more_in_a_long_text():
    """A window keeps what it holds, and no more."""
    ngrams = NGrams(30, window=90, may_repeat={7})
    for number in range(5000):
        ngrams.append(number % 40)
    assert ngrams.banned() == {5000 % 40}
    assert len(ngrams._next) <= 90


@settings(deadline=None)
@given(few_tokens, few_tokens, st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=4)))
def test_bad_sequences(prompt, output, sequences):
    sequences = [*map(tuple, sequences), (0, 1)]
    tracker = BadSequences(sequences, prompt)
    for token_id in output:
        tracker.append(token_id)
    text = "".join(map(str, prompt + output))
    expected = {ids[-1] for ids in sequences if text.endswith("".join(map(str, ids[:-1])))}
    assert tracker.banned() == expected


def run(cap, choices):
    """Returns the output of a model that would choose `choices`."""
    output = []
    for choice in choices:
        token_id = choice if cap.forced is None else cap.forced
        cap.append(token_id)
        output.append(token_id)
    return output


class TestThinkingCap:
    @pytest.mark.parametrize(
        ("end_ids", "limit", "choices", "expected"),
        [
            ((9,), 3, [1, 1, 1, 2, 2], [1, 1, 1, 9, 2]),
            ((8, 9), 2, [1, 1, 2, 2, 2], [1, 1, 8, 9, 2]),
            ((9,), 3, [1, 9, 1, 1, 1], [1, 9, 1, 1, 1]),  # it ended by itself
            ((8, 9), 3, [8, 9, 1, 1, 1], [8, 9, 1, 1, 1]),
            ((9,), 3, [1, 1, 9, 2, 2], [1, 1, 9, 2, 2]),  # it ended with the last free token
            (
                (8, 9),
                3,
                [1, 1, 8, 2, 2],
                [1, 1, 8, 9, 2],
            ),  # the marker that it had begun is completed
            ((8, 8, 9), 2, [8, 8, 1, 1, 1], [8, 8, 9, 1, 1]),
            ((8, 7, 8, 9), 1, [8, 1, 1, 1, 1], [8, 7, 8, 9, 1]),
            ((8, 9), 3, [9, 8, 1, 1, 1], [9, 8, 1, 8, 9]),
        ],
    )
    def test_the_end_is_forced(self, end_ids, limit, choices, expected):
        assert run(ThinkingCap(end_ids, limit), choices) == expected

    @settings(deadline=None)
    @given(
        st.lists(st.integers(0, 2), min_size=1, max_size=4),
        st.integers(1, 6),
        st.lists(st.integers(0, 2), min_size=12, max_size=12),
    )
    def test_it_always_ends_in_time(self, end_ids, limit, choices):
        cap = ThinkingCap(end_ids, limit)
        output = run(cap, choices)
        ends = [i for i in range(len(output)) if output[i : i + len(end_ids)] == end_ids]
        assert cap.is_closed
        assert ends[0] <= limit
        assert output[ends[0] + len(end_ids) :] == choices[ends[0] + len(end_ids) :]
