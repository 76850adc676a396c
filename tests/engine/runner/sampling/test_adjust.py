"""Each rule on logits, compared with transformers' processor of the same name or with plain
Python."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from mmdeploy_llm.engine.runner.sampling.adjust import adjust
from mmdeploy_llm.engine.runner.sampling.state import SlotState

VOCAB_SIZE = 40
BAD_WORDS = ((3,), (7, 8), (8, 8), (1, 2, 5), (9, 9, 9, 4), (39,))


@pytest.fixture(params=range(4))
def sequence(request):
    """Returns a prompt and an output of few different tokens, so that n-grams and bad words
    occur."""
    rng = np.random.default_rng(request.param)
    tokens = rng.choice([1, 2, 5, 7, 8, 9, 9, 9], size=60).tolist()
    return tokens[:25], tokens[25:]


def logits_of(num_rows=1):
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 4


def adjusted(logits, *requests, holds_stops=False):
    """Applies the rules of the requests to a copy of the rows."""
    work = logits.clone()
    states = [SlotState(request, VOCAB_SIZE, None) for request in requests]
    adjust(work, states, np.full(len(states), holds_stops))
    return work


def ids_of(sequence):
    return torch.tensor([sequence[0] + sequence[1]])


def split(sequence):
    return {"prompt_token_ids": sequence[0], "output_token_ids": sequence[1]}


@pytest.mark.parametrize("penalty", [0.5, 1.2, 3.0])
def test_repetition_penalty(make_request, sequence, penalty):
    logits = logits_of()
    expected = RepetitionPenaltyLogitsProcessor(penalty)(ids_of(sequence), logits.clone())
    found = adjusted(logits, make_request(**split(sequence), repetition_penalty=penalty))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_presence_and_frequency_penalty_look_at_the_output_only(make_request, sequence):
    logits = logits_of()
    request = make_request(**split(sequence), presence_penalty=0.5, frequency_penalty=-0.3)
    expected = logits.clone()
    for token_id in set(sequence[1]):
        expected[0, token_id] -= -0.3 * sequence[1].count(token_id) + 0.5
    torch.testing.assert_close(adjusted(logits, request), expected)


def test_repetition_comes_before_presence(make_request):
    request = make_request(
        prompt_token_ids=(4,), output_token_ids=(5, 5), repetition_penalty=2.0, presence_penalty=1.0
    )
    logits = torch.full((1, VOCAB_SIZE), 8.0)
    found = adjusted(logits, request)[0]
    assert found[[3, 4, 5]].tolist() == [8.0, 4.0, 3.0]


def test_bad_words(make_request, sequence):
    logits = logits_of()
    words = [list(ids) for ids in BAD_WORDS]
    expected = NoBadWordsLogitsProcessor(words, eos_token_id=38)(ids_of(sequence), logits.clone())
    found = adjusted(logits, make_request(**split(sequence), bad_words_token_ids=BAD_WORDS))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_no_repeat_ngram_size(make_request, sequence, size):
    logits = logits_of()
    expected = NoRepeatNGramLogitsProcessor(size)(ids_of(sequence), logits.clone())
    found = adjusted(logits, make_request(**split(sequence), no_repeat_ngram_size=size))
    assert torch.equal(found, expected)
    assert found.isinf().any() or size > 2


def test_ngrams_and_bad_words_of_a_prompt_shorter_than_they_are(make_request):
    request = make_request(
        prompt_token_ids=(7,), no_repeat_ngram_size=3, bad_words_token_ids=((7, 8), (1, 7, 9))
    )
    assert adjusted(logits_of(), request).isinf().nonzero().tolist() == [[0, 8]]


def test_min_tokens_hold_back_every_stop(make_request):
    logits = logits_of()
    request = make_request(
        prompt_token_ids=(1, 2),
        output_token_ids=(5,),
        eos_token_ids=(11, 12),
        stop_token_ids=(30,),
        min_tokens=2,
        ignore_eos=True,
    )
    processor = MinNewTokensLengthLogitsProcessor(2, 2, [11, 12, 30])
    expected = processor(torch.tensor([[1, 2, 5]]), logits.clone())
    assert torch.equal(adjusted(logits, request, holds_stops=True), expected)
    assert torch.equal(adjusted(logits, request), logits)


def test_logit_bias(make_request):
    logits = logits_of()
    bias = {0: 1.5, 39: -100.0, 17: 3.25}
    processor = SequenceBiasLogitsProcessor(
        [[[token_id], value] for token_id, value in bias.items()]
    )
    expected = processor(torch.tensor([[1, 2]]), logits.clone())
    torch.testing.assert_close(adjusted(logits, make_request(logit_bias=bias)), expected)


def test_bias_comes_before_penalties(make_request):
    request = make_request(prompt_token_ids=(6,), logit_bias={6: -10.0}, repetition_penalty=2.0)
    assert adjusted(torch.full((1, VOCAB_SIZE), 4.0), request)[0, 6] == -12.0


def test_values_beyond_float32_stay_numbers(make_request):
    request = make_request(
        prompt_token_ids=(6, 7), logit_bias={6: 1e300, 5: -1e300}, repetition_penalty=1e200
    )
    logits = torch.zeros(1, VOCAB_SIZE)
    assert adjusted(logits, request).isfinite().all()


def test_tokens_outside_the_vocabulary_are_left_alone(make_request):
    """Placeholders of media may have ids that the model cannot generate."""
    request = make_request(
        prompt_token_ids=(99, 99, 5, 99),
        eos_token_ids=(77,),
        bad_words_token_ids=((50,), (99, 50), (99, 3)),
        no_repeat_ngram_size=2,
        repetition_penalty=2.0,
        min_tokens=1,
    )
    logits = torch.full((1, VOCAB_SIZE), 6.0)
    found = adjusted(logits, request, holds_stops=True)[0]
    changed = {place: found[place].item() for place in (found != 6.0).nonzero()[:, 0].tolist()}
    assert changed == {3: -torch.inf, 5: -torch.inf}


def test_rows_do_not_mix(make_request, sequence):
    requests = [
        make_request(),
        make_request(**split(sequence), repetition_penalty=1.3, frequency_penalty=0.2),
        make_request(bad_words_token_ids=BAD_WORDS, logit_bias={4: 2.0}),
        make_request(**split(sequence), no_repeat_ngram_size=2, presence_penalty=1.0),
        make_request(prompt_token_ids=(), repetition_penalty=1.3),
    ]
    logits = logits_of(len(requests))
    together = adjusted(logits, *requests)
    for row, request in enumerate(requests):
        assert torch.equal(together[row : row + 1], adjusted(logits[row : row + 1], request))
    assert torch.equal(together[0], logits[0])
    assert torch.equal(together[4], logits[4])
