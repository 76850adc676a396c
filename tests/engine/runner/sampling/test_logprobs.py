"""Log-probabilities and ranks, compared with a full sort."""

import math

import numpy as np
import pytest
import torch

from mmdeploy_llm.engine.runner.sampling.logprobs import prompt_logprobs, sampled_logprobs

VOCAB_SIZES = (10, 700, 70_000)


def logits_of(num_rows, vocab_size, has_ties=False):
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(1)) * 3
    return logits.round() if has_ties else logits


def expected_entry(row, token_id, k):
    """Returns the entry by Python's sort: by falling logit, then rising id."""
    logits = row.tolist()
    order = sorted(range(len(logits)), key=lambda one: (-logits[one], one))
    ranks = {one: place for place, one in enumerate(order, start=1)}
    shift = max(logits)
    total = math.log(math.fsum(math.exp(one - shift) for one in logits)) + shift
    chosen = list(dict.fromkeys([token_id, *order[:k]]))
    return [(one, ranks[one], logits[one] - total) for one in chosen]


@pytest.mark.one_is_quick
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("has_ties", [False, True])
@pytest.mark.parametrize("k", [0, 1, 20])
def test_entries(vocab_size, has_ties, k):
    logits = logits_of(3, vocab_size, has_ties)
    ids = torch.tensor([0, vocab_size - 1, int(logits[2].argmax())])
    k = min(k, vocab_size)
    for row, token_id, entry in zip(
        logits, ids.tolist(), prompt_logprobs(logits, ids, k), strict=True
    ):
        expected = expected_entry(row, token_id, k)
        assert list(entry) == [one for one, _, _ in expected]
        assert [value.rank for value in entry.values()] == [rank for _, rank, _ in expected]
        found = [value.logprob for value in entry.values()]
        np.testing.assert_allclose(found, [value for _, _, value in expected], atol=1e-4)
        assert all(value.decoded_token is None for value in entry.values())


@pytest.mark.parametrize("k", [-1, 10, 99])
def test_the_whole_vocabulary(k):
    logits = logits_of(2, 10, has_ties=True)
    first, second = prompt_logprobs(logits, torch.tensor([4, 0]), k)
    assert set(first) == set(second) == set(range(10))
    assert next(iter(first)) == 4
    assert sorted(value.rank for value in first.values()) == list(range(1, 11))
    assert math.fsum(math.exp(value.logprob) for value in first.values()) == pytest.approx(1)


def test_a_row_is_the_same_among_others():
    logits = logits_of(21, 5000).bfloat16()
    ids = torch.arange(21) * 7
    together = prompt_logprobs(logits, ids, 4)
    for row in range(21):
        assert prompt_logprobs(logits[row : row + 1], ids[row : row + 1], 4) == (together[row],)


def test_rows_may_want_different_numbers_of_tokens():
    logits, ids = logits_of(4, 300), torch.tensor([1, 2, 3, 4])
    counts = np.array([3, 0, -1, 3])
    found = sampled_logprobs(logits, ids, counts)
    for row, k in enumerate(counts.tolist()):
        assert (found[row],) == prompt_logprobs(logits[row : row + 1], ids[row : row + 1], k)


def test_banned_tokens_have_minus_infinity():
    logits = torch.full((1, 500), -torch.inf)
    logits[0, 7] = 2.0
    (entry,) = prompt_logprobs(logits, torch.tensor([7]), 3)
    assert [(one, value.logprob) for one, value in entry.items()] == [
        (7, 0.0),
        (0, -math.inf),
        (1, -math.inf),
    ]


def test_no_rows_give_no_entries():
    assert prompt_logprobs(torch.empty(0, 10), torch.empty(0, dtype=torch.int64), 2) == ()
