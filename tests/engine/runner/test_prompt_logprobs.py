"""Log-probabilities of a prompt, computed from a few rows of logits at once."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from mmdeploy_llm.engine.runner.sampling import logprobs as module
from mmdeploy_llm.values.params import SamplingParams
from mmdeploy_llm.values.plan import NewRequest, ScheduledTokens

VOCAB_SIZE, LENGTH = 11, 9


@pytest.fixture
def request_():
    return NewRequest(
        request_id="r",
        token_ids=(*range(LENGTH), 3, 4),  # two generated before a preemption
        prompt_len=LENGTH,
        params=SamplingParams(prompt_logprobs=2),
        eos_token_ids=frozenset(),
    )


def entries(request, start, num_tokens, seen, *of_rows):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(LENGTH + 2, VOCAB_SIZE, generator=generator)

    def logits_of(hidden):
        seen.append(len(hidden))
        return table[hidden[:, 0].long()]

    item = ScheduledTokens(request_id="r", start=start, num_tokens=num_tokens, samples=False)
    hidden = torch.arange(start, start + num_tokens).float()[:, None]
    return module.prompt_entries(request, item, hidden, logits_of, *of_rows)


def test_few_rows_of_logits_at_once(request_, monkeypatch):
    seen = []
    whole = entries(request_, 0, LENGTH + 2, seen)
    assert seen == [LENGTH - 1]
    assert whole[0] is None
    assert [next(iter(entry)) for entry in whole[1:]] == list(range(1, LENGTH))
    monkeypatch.setattr(module, "MAX_ROWS", 3)
    seen.clear()
    assert entries(request_, 0, LENGTH + 2, seen) == whole
    assert seen == [3, 3, 2]


def test_the_rows_of_logits_are_told(request_, monkeypatch):
    monkeypatch.setattr(module, "MAX_ROWS", 5)
    told = []

    def of_rows(rows):
        told.append((rows.start, rows.stop))
        return nullcontext()

    entries(request_, 0, LENGTH, [], of_rows)
    assert told == [(0, 5), (5, LENGTH - 1)]  # nothing follows the last one


def test_chunks_of_a_prompt(request_):
    whole = entries(request_, 0, LENGTH, [])
    parts = [entries(request_, *part, []) for part in ((0, 4), (4, 4), (8, 1))]
    assert sum(parts, ()) == whole
    assert parts[2] == ()  # nothing follows the last one


def test_a_token_without_a_logit(request_):
    """Such as the place of a picture that is beyond the vocabulary."""
    ids = (*range(4), VOCAB_SIZE, *range(5, LENGTH))
    found = entries(replace(request_, token_ids=ids), 0, LENGTH, [])
    whole = entries(request_, 0, LENGTH, [])
    assert found == (*whole[:4], None, *whole[5:])


def test_which_requests_want_prompt_logprobs(request_):
    item = ScheduledTokens(request_id="r", start=LENGTH, num_tokens=1, samples=True)
    assert not module.wants_prompt_logprobs(request_, item)
